"""Servers whose memory KV and activations share, as the paper on elastic memory has it, and the
decoding half of a server that prefills elsewhere.

```
 device memory beside the weights, in tokens of KV
 |<------------------------- pool ------------------------->|
 |  KV of requests that run  |  KV of a prompt | activations |   while a prompt is computed
 |  KV of requests that run                           | free |   while requests decode
```

Kept of its Alg. 1: prompts are computed whole; one joins if its KV and its activations have room
beside the watermark, or its activations alone, and host memory takes its KV; all of it at once or
not at all; what is in host memory comes back while it fits. Read into it, since its P_T is all
memory and its M_kv the new requests' alone: KV of requests that run leaves no room for that of a
prompt, but makes way, to host memory, for the activations of one that host memory has room for.
Else next to nothing would go there: memory is full of KV whenever prompts wait.

Kept of Alg. 2: `engine.host_buffer`, the server's own. Left out: the activations of decode steps (a
row per request: under a thousandth of memory), and the time of mapping (the paper: 1 to 5 %).
Copying to host memory costs no time, as everywhere in the simulator; fetching blocks decoding, as
in mode `swap`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.engine.host_buffer import HostBuffer
from ellm_sgl.eval.simulator.admission.vllm import WATERMARK, VllmAdmission
from ellm_sgl.eval.simulator.load import Load, Progress, VirtualClock
from ellm_sgl.eval.simulator.modes import Chunk, HostStore, Mode, Moves, Span
from ellm_sgl.memory import PageTable
from ellm_sgl.policies import MemoryState, Requests


class Balloon(Mode):
    """Memory that inflates for KV and deflates for the activations of prompts.

    Args:
        host: where prompts' KV may go, and that of requests that lose their place. None: there is
            no such memory, and what loses its place is computed again.
        activation_tokens: tokens of KV whose memory a prompt's row takes while it is computed.
        buffer: bounds what prompts may take of host memory. None: all of it.
    """

    def __init__(
        self,
        table: PageTable,
        load: Load,
        progress: Progress,
        clock: VirtualClock,
        host: HostStore | None,
        activation_tokens: float,
        buffer: HostBuffer | None,
    ) -> None:
        super().__init__(table, load, progress, host)
        self._clock = clock
        self._activation_tokens = activation_tokens
        self._buffer = buffer
        self._looks = 1
        """Of Alg. 2, once for each iteration since the last decision: many steps are simulated at
        once."""
        self._kept_blocks = 0
        """For the activations of the prompt that is next."""
        self._sent_out: set[int] = set()
        """Prompts of the step being prepared, whose KV goes to host memory."""

    def decide(self, running: Sequence[int], waiting: IntArray) -> Moves:
        out = self.progress.on_host[waiting]
        prompts = waiting[~out].tolist()
        if self._buffer is not None:
            now = np.array(running, np.int64)
            seen = self._seen(now), self._seen(waiting[~out]), self._memory()
            for _ in range(max(self._looks, 1)):
                self._buffer.observe(*seen)
        self._looks = 0
        self._kept_blocks = self._kept_for(prompts[0]) if prompts else 0
        back = self._coming_back(len(running), waiting[out].tolist())
        return Moves(admit=prompts, back=back)

    def decoded(self, ids: IntArray, steps: int) -> None:
        self._looks += steps

    def _kept_for(self, request: int) -> int:
        tokens = self.prefill_tokens(request)
        in_host = self.host_room() >= self.table.shape.blocks_for(tokens)
        return self.watermark + self.activation_blocks(tokens) if in_host else 0

    @property
    def watermark(self) -> int:
        """θ, in blocks: as vLLM's."""
        return int(WATERMARK * self.table.num_blocks)

    @property
    def spare_blocks(self) -> int:
        return max(self.free_blocks - self._kept_blocks, 0)

    def activation_blocks(self, tokens: int) -> int:
        """Blocks whose memory the activations of so many rows take."""
        return self.table.shape.blocks_for(int(np.ceil(self._activation_tokens * tokens)))

    def offload(self, request: int) -> None:
        """The KV of this prompt goes to host memory while it is computed."""
        self._sent_out.add(request)

    def host_room(self) -> float:
        """Blocks that prompts may still take of host memory."""
        if self.host is None:
            return 0
        most = self.host.tokens
        if self._buffer is not None:
            most = min(most, self._buffer.tokens or 0)
        taken = self._on_host_blocks() + sum(
            self.table.shape.blocks_for(self.prefill_tokens(i)) for i in self._sent_out
        )
        return most / self.table.shape.block_tokens - taken

    def enter(self, chunk: Chunk) -> Span:
        if chunk.request not in self._sent_out:
            return super().enter(chunk)
        self.table.map(chunk.request, np.zeros(0, np.int32), 0)
        return Span()

    def computed_into_host(self, request: int) -> bool:
        if request not in self._sent_out:
            return False
        self._sent_out.remove(request)
        self.forget(request)
        self.progress.on_host[request] = True
        return True

    def leave(self, request: int, retracted: bool) -> None:
        super().leave(request, retracted)
        self._sent_out.discard(request)

    def _seen(self, ids: IntArray) -> Requests:
        """What Alg. 2 looks at, of these requests."""
        load, progress, now_s = self.load, self.progress, self._clock.now_s
        generated, nothing = progress.generated[ids], np.zeros(len(ids), np.int64)
        began = generated > 0
        since = np.where(began, progress.last_s[ids], load.at_s[ids])
        spent = progress.last_s[ids] - progress.first_s[ids]
        return Requests(
            request_id=ids,
            tokens=load.prompt_tokens[ids] + generated,
            prompt_tokens=load.prompt_tokens[ids],
            max_new_tokens=load.max_new_tokens[ids],
            shared_tokens=nothing,
            uncached_tokens=nothing,
            uncached_on_host=nothing,
            arrival_s=load.at_s[ids],
            waited_s=now_s - since,
            priority=load.priority[ids],
            tpot_slo_s=load.tpot_slo_s[ids],
            ttft_slo_s=load.ttft_slo_s[ids],
            tpot_s=np.where(generated > 1, spent / np.maximum(generated - 1, 1), np.nan),
        )

    def _memory(self) -> MemoryState:
        """Likewise; a host without a bound has room for whatever there can be."""
        block = self.table.shape.block_tokens
        everything = int((self.load.prompt_tokens + self.load.output_tokens + block).sum())
        most = 0 if self.host is None else int(min(self.host.tokens, everything))
        return MemoryState(
            block_tokens=block,
            device_tokens=self.table.num_blocks * block,
            device_free_tokens=self.free_blocks * block,
            host_tokens=most,
            host_free_tokens=max(most - self._on_host_blocks() * block, 0),
            max_restored_tokens=0,
            staging_overhead=0.0,
        )


class BalloonAdmission(VllmAdmission):
    """Alg. 1's prefill phase, with vLLM's watermark for its θ."""

    def __init__(self, mode: Balloon, chunk_tokens: int, max_running: int) -> None:
        super().__init__(mode, chunk_tokens, max_running)
        self.balloon = mode

    def _admit(
        self, running: Sequence[int], wanted: Sequence[int], anybody_waits: bool
    ) -> tuple[Chunk, ...]:
        mode, blocks_for = self.balloon, self.mode.table.shape.blocks_for
        free, left = mode.free_blocks - mode.watermark, self.chunk_tokens
        places = self.max_running - len(running)
        chunks: list[Chunk] = []
        for request in wanted:
            tokens = mode.prefill_tokens(request)
            kv, activations = blocks_for(tokens), mode.activation_blocks(tokens)
            if tokens > left:
                break
            if (not running and not chunks) or free >= kv + activations:
                if places == 0:
                    break
                free, places = free - kv - activations, places - 1
            elif free >= activations and mode.host_room() >= kv:
                free -= activations
                mode.offload(request)
            else:
                break
            left -= tokens
            chunks.append(Chunk(request, 0, tokens, last=True))
        return tuple(chunks)


class Prefilled(Mode):
    """A decoding instance (DistServe): requests come when their prompts have been computed
    elsewhere, and have had their first token; their KV is fetched when it fits."""

    def arrived(self, request: int) -> None:
        progress = self.progress
        progress.on_host[request] = True
        progress.generated[request] = 1
        progress.first_s[request] = progress.last_s[request] = self.load.at_s[request]
