import sys, math, json, time, numpy as np, itertools, os
from ellm_sgl.eval.simulator import Simulation, Load, preset, Settings
from ellm_sgl.client.workloads import paper_workload
def run(machine, settings, load):
    sim = Simulation(machine, settings, load); sim.run(); rec = sim.record; p = sim.progress
    served = ~p.refused
    decoded = p.generated-1; spent = p.last_s-p.first_s
    tpot = np.where(decoded>0, spent/np.maximum(decoded,1), 0)
    ok = served & ~(tpot>load.tpot_slo_s)
    secs = np.nanmax(p.last_s)-load.at_s.min()
    ttft = np.nanmean(p.first_s-load.at_s)
    return dict(raw=p.generated.sum()/secs, comp=p.generated[ok].sum()/secs, att=ok.mean(), ttft=ttft, tpot99=float(np.quantile(tpot[served],.99)), retr=rec.retractions)
PRESETS = {"llama2-13b":(0.5,.045), "llama3-8b":(0.16,.1), "llama2-70b":(1.6,.06)}
def cells():
    for name in PRESETS:
        sustained, step = PRESETS[name]
        for f in (0.5,1.0,3.0):
            for lengths in ("known","unknown","tight"):
                for slo in ("none","loose","tightslo"):
                    yield name,f,lengths,slo
def load_of(name,f,lengths,slo,seed,n):
    sustained, step = PRESETS[name]
    t = paper_workload("sharegpt", n, seed, sustained*f)
    mx = {"known":None,"unknown":3000,"tight":8000}[lengths]
    s = {"none":math.inf,"loose":4*step,"tightslo":1.3*step}[slo]
    return Load.of(t, mx, s), s
if __name__=="__main__":
    n=int(sys.argv[1]); seed=int(sys.argv[2]); only=sys.argv[3:] 
    pol=os.environ.get("POLICY","fcfs")
    for c in cells():
        if only and not any(o in c[0]+":"+c[2]+":"+c[3]+":"+str(c[1]) for o in only): continue
        load,slo=load_of(*c,seed,n)
        m=preset(c[0])
        res={}
        base=[]
        if os.environ.get("BASE","1")=="1":
          for mode,cons in itertools.product(("recompute","swap"),(1.0,0.3)):
            r=run(m,Settings(mode=mode,tpot_slo_s=slo,conservativeness=cons),load); base.append((r["comp"],r["att"],mode,cons,r))
        e=run(m,Settings(policy=pol,tpot_slo_s=slo),load)
        if base:
            b=max(base,key=lambda x:x[0]); ba=b[1]
            print(f"{c[0]:11s} x{c[1]} {c[2]:8s} {c[3]:8s} | eLLM comp {e['comp']:6.0f} att {e['att']:.2f} ttft {e['ttft']:6.1f} tpot99 {1e3*e['tpot99']:5.0f} | best {b[2]} {b[3]} {b[0]:6.0f} {ba:.2f} ttft {b[4]['ttft']:6.1f} tpot99 {1e3*b[4]['tpot99']:5.0f} | ratio {e['comp']/max(b[0],1e-9):.3f} raw {e['raw']/max(x[4]['raw'] for x in base):.3f} datt {e['att']-ba:+.2f} {'<<<' if e['comp']<.97*b[0] or e['att']<ba-.02 else ''}",flush=True)
        else: print(c,e,flush=True)
