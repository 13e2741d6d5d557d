"""`ellm-sgl verify`: the same requests with everything cached and with parts of the KV missing.

The reference is stock SGLang (eLLM off). It is compared with eLLM at several uncached ratios, and
with a pool so small that blocks are evicted under pressure, and again with a host tier: at every
split between layers that are fetched and layers that are recomputed; with hidden states of all
layers on the host instead of KV, or of half of them on the device; and with recomputation in a pass
of its own. Then with chats that share a prefix and rotate on a device that holds a part of
them: with streams aborted in the middle, with a pool that is resized, with a store on disk and from
it, in mixed chunks, and on two ranks.

A comparison that compared nothing, or whose setting exercised nothing, fails (`comparing`).
"""
