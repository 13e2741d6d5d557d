"""Paired cost of two trees: python paired_trees.py BASE NEW ROUNDS LIVES [settings]"""
import json, random, statistics, sys, time
from ellm_sgl.eval.bench import loads
from ellm_sgl.client.process import ServerProcess, DEMO_ARGUMENTS
base, new, rounds, lives = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
wanted = sys.argv[5:]
SET = {
    "r0": ["--ellm-policy","fixed-ratio","--ellm-device-kv-tokens","40000"],
    "r0.4": ["--ellm-policy","fixed-ratio","--ellm-ratio","0.4","--ellm-device-kv-tokens","40000"],
    "host": ["--ellm-policy","fcfs","--ellm-layer-group","1","--ellm-device-kv-tokens","2816","--ellm-host-kv-tokens","16384"],
    "off": ["--max-total-tokens","40000"],
}
for name, args in SET.items():
    if wanted and name not in wanted: continue
    ratios = []
    count, tokens = (6, 48) if name == 'r0.4' else (24, 96)
    for life in range(lives):
        trees = {"base": base, "new": new}
        servers = {}
        order = list(trees) if life % 2 == 0 else list(trees)[::-1]
        for t in order:
            s = ServerProcess([*DEMO_ARGUMENTS, *args], {"OMP_NUM_THREADS":"1","PYTHONPATH":trees[t]})
            s.start(); servers[t] = s
        try:
            for t in order:
                loads.generate(servers[t], loads.draw_prompts(f"w{life}", count, 128), 64)
            for r in range(rounds):
                p = loads.draw_prompts(f"{life}/{r}", count, 128)
                got, out = {}, {}
                for t in (order if r % 2 == 0 else order[::-1]):
                    servers[t].flush_cache()
                    k = loads.generate(servers[t], p, tokens)
                    got[t], out[t] = k.figures["tokens_per_s"], k.outputs
                assert out["base"] == out["new"], name
                ratios.append(got["new"]/got["base"])
                print(name, life, r, {t: round(v) for t, v in got.items()}, round(ratios[-1],3), flush=True)
        finally:
            for s in servers.values(): s.stop()
    q = statistics.quantiles(ratios, n=4)
    print("==", name, "median", round(statistics.median(ratios),4), "quartiles", round(q[0],3), round(q[2],3), "n", len(ratios), flush=True)
