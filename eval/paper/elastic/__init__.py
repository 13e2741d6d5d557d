"""The paper on elastic memory ("eLLM: Elastic Memory Management"): its Figs. 9 to 11, simulated."""
