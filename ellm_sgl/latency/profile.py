"""The two things a latency model knows beside the step: the model served and the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer, as one tensor-parallel rank holds them."""

    layers: int
    """L."""
    hidden: int
    """h, elements of a token's hidden state."""
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP; of one expert, where there are experts."""
    vocabulary: int
    """V, rows of the output head."""
    experts: int = 1
    """Experts per layer; 1 is a dense MLP."""
    experts_per_token: int = 1
    weight_bytes: int = 2
    """Bytes of one weight."""
    kv_bytes: int = 2
    """Bytes of one element of the KV cache."""

    def in_elements_of(self, nbytes: int) -> ModelShape:
        """The same model, weights and KV of so many bytes each."""
        return replace(self, weight_bytes=nbytes, kv_bytes=nbytes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's four projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert's gate, up and down projections (of the MLP, if dense)."""
        return 3 * self.hidden * self.intermediate


@dataclass(frozen=True)
class HardwareProfile:
    """What one rank's device sustains. Measured at start-up, or a preset."""

    name: str
    flops: float
    """Floating-point operations per second of large matrix products."""
    device_bytes_per_s: float
    """Read bandwidth of the device's memory, as weights and KV are read."""
    link_bytes_per_s: float
    """Bandwidth of the link to host memory; on a CPU host, of a copy."""
    link_latency_s: float
    """Fixed time of one transfer (β of Eq. 6)."""
    step_overhead_s: float
    """Time of a step besides what its rows and tokens take."""
    row_overhead_s: float
    """Further time of a step for each request decoded."""
    attention_flops: float
    """Operations per second of attention over many rows (spans, prefill)."""
    kv_bytes_per_s: float | None = None
    """Bandwidth at which attention reads KV; None: `device_bytes_per_s`. Lower where the kernel
    gathers KV into a copy first."""
    packing: float = 0.0
    """Further time to read weights once a step has more than one row, as a share of reading them:
    CPU libraries rearrange the weights then."""
    overlap: float = 1.0
    """Share of the computing with weights that goes on while they are read: 1 on a GPU, near 0 for
    CPU libraries."""
    fetch_share: float = 0.0
    """By what a transfer from host memory lengthens the step that it runs beside, as a share of its
    own time: preparing it, and the processor and memory that it takes. Several times its own time
    where the processor itself copies."""
    restore_overhead_s: float = 0.0
    """Further time of a step that restores anything, however little: it is planned anew, and its
    layers wait for what arrives."""
    recompute_overhead_s: float = 0.0
    """The same, of a step that recomputes anything: on a CUDA device it runs layer by layer, where
    others are captured graphs."""
    phase_change_s: float = 0.0
    """Further time of a step that prefills after one that decoded, or the other way round."""
    reduce_row_s: float = 0.0
    """Further time of a step for each row of any kind (decoded, prefilled, recomputed): moving its
    hidden states between the ranks. Nothing over a link as fast as NVLink."""
