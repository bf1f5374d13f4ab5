"""Native CPU kernels and process-shared wait words. Every `*_address` is a raw memory address, 0 for "none".

Strides count elements from row to row; consecutive elements of a row are adjacent. Calls that compute release the GIL.
"""

import enum

def load_u32(address: int) -> int: ...
def wait_u32(address: int, old_value: int, timeout_ns: int, spin_ns: int) -> bool: ...
def fetch_add_wake_u32(address: int, amount: int) -> int: ...
def isa() -> str: ...
def available_isas() -> list[str]: ...
def set_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(num_threads: int) -> None: ...
def work_alone() -> None:
    """What the calling thread computes from now on leaves the pool's threads to others."""

def set_spin_ns(spin_ns: int) -> None: ...
def release_core() -> None:
    """One thread of the pool that spins sleeps now, until the next kernel: a process that is woken finds a core."""

class PackedFormat:
    @staticmethod
    def floats(is_bf16: bool) -> PackedFormat: ...
    @staticmethod
    def quantized(codes: str, scales: str, offset: str, group: int) -> PackedFormat: ...

class SourceAddresses:
    def __init__(
        self,
        data_address: int,
        row_bytes: int,
        scales_address: int = 0,
        offsets_address: int = 0,
        units_address: int = 0,
        scale_stride: int = 0,
    ) -> None: ...

def read_ggml_rows(
    type: str,
    blocks_address: int,
    row_bytes: int,
    num_rows: int,
    num_blocks: int,
    codes_address: int,
    scales_address: int,
    offsets_address: int,
    units_address: int,
) -> None: ...

class PackedLinear:
    def __init__(
        self,
        is_bf16: bool,
        format: PackedFormat,
        outputs: int,
        inner: int,
        weight: SourceAddresses,
        bias_address: int,
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def linear(
        self,
        x_address: int,
        num_rows: int,
        x_stride: int,
        residual_address: int,
        residual_stride: int,
        out_address: int,
        out_fp32: bool,
    ) -> None: ...
    def take_rows(self, ids_address: int, num_rows: int, out_address: int) -> None: ...

class GateOptions:
    sigmoid: bool
    top_k: int
    num_groups: int
    top_k_groups: int
    group_score_top2: bool
    normalize: bool
    softmax_after_top_k: bool
    scaling: float

    def __init__(self) -> None: ...

def gate(
    weight: PackedLinear,
    options: GateOptions,
    x_address: int,
    num_rows: int,
    x_stride: int,
    score_bias_address: int,
    ids_address: int,
    weights_address: int,
) -> None: ...

class PackedExperts:
    def __init__(
        self,
        is_bf16: bool,
        gate_up: PackedFormat,
        down: PackedFormat,
        num_experts: int,
        hidden: int,
        intermediate: int,
        activation: str,
        alpha: float,
        limit: float,
        has_bias: bool,
        ordered: bool = False,
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def set_expert(
        self,
        index: int,
        gate: SourceAddresses,
        up: SourceAddresses,
        down: SourceAddresses,
    ) -> None: ...
    def set_bias(self, index: int, gate_address: int, up_address: int, down_address: int) -> None: ...
    def set_order(self, index: int, order_address: int) -> None: ...
    def grouped_ffn(
        self,
        x_address: int,
        num_rows: int,
        x_stride: int,
        ids_address: int,
        weights_address: int,
        top_k: int,
        out_address: int,
    ) -> None: ...

class BatchAddresses:
    def __init__(
        self,
        positions_address: int,
        slots_address: int,
        query_starts_address: int,
        context_lens_address: int,
        block_tables_address: int,
        table_stride: int,
        num_sequences: int,
        num_rows: int,
    ) -> None: ...
    def look(self, block_size: int) -> None:
        """Read the values, which stay as they are: calls then refuse what is outside of cache and rotary table."""

class RotaryAddresses:
    def __init__(
        self, cos_address: int, sin_address: int, num_positions: int, half: int, interleaved: bool
    ) -> None: ...

class KVCache:
    def __init__(
        self,
        is_bf16: bool,
        storage: str,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def rotate_and_store(
        self,
        layer: int,
        batch: BatchAddresses,
        rotary: RotaryAddresses,
        qkv_address: int,
        num_heads: int,
        q_norm_address: int,
        k_norm_address: int,
        eps: float,
        q_address: int,
    ) -> None: ...
    def paged_attention(
        self,
        layer: int,
        batch: BatchAddresses,
        q_address: int,
        num_heads: int,
        scale: float,
        sliding_window: int,
        sinks_address: int,
        out_address: int,
    ) -> None: ...
    def read_tokens(
        self,
        layer: int,
        blocks_address: int,
        first: int,
        count: int,
        heads_address: int,
        num_heads: int,
        rows_address: int,
    ) -> None: ...
    def write_tokens(
        self,
        layer: int,
        blocks_address: int,
        first: int,
        count: int,
        heads_address: int,
        num_heads: int,
        rows_address: int,
    ) -> None: ...

def rms_norm(
    is_bf16: bool,
    x_address: int,
    num_rows: int,
    stride: int,
    width: int,
    weight_address: int,
    eps: float,
    out_address: int,
    out_stride: int,
) -> None: ...
def add_rms_norm(
    is_bf16: bool,
    x_address: int,
    delta_address: int,
    num_rows: int,
    width: int,
    weight_address: int,
    eps: float,
    sum_address: int,
    out_address: int,
) -> None:
    """`out_address` 0: only the sum is wanted."""

def argmax_rows(logits_address: int, num_rows: int, width: int, stride: int, ids_address: int) -> None: ...

class GridRows:
    """Rows numbered over three axes, the last one fastest; strides count elements."""

    def __init__(
        self,
        address: int,
        first: int,
        second: int,
        third: int,
        first_stride: int,
        second_stride: int,
        third_stride: int,
    ) -> None: ...

def training_norm(
    is_bf16: bool,
    x: GridRows,
    width: int,
    weight_address: int,
    eps: float,
    out_address: int,
    factors_address: int,
) -> None: ...
def training_norm_gradient(
    is_bf16: bool,
    x: GridRows,
    grad: GridRows,
    width: int,
    weight_address: int,
    factors_address: int,
    grad_x_address: int,
    grad_weight_address: int,
) -> None: ...

class Angles:
    """Cosines and sines [..., half]; the strides are those over the first two axes of a grid of heads."""

    def __init__(
        self,
        cos_address: int,
        sin_address: int,
        first_stride: int,
        second_stride: int,
        half: int,
        interleaved: bool,
    ) -> None: ...

def training_turn(
    is_bf16: bool,
    x: GridRows,
    width: int,
    angles: Angles,
    weight_address: int,
    eps: float,
    factors_address: int,
    out_address: int,
) -> None: ...
def training_turn_gradient(
    is_bf16: bool,
    grad: GridRows,
    width: int,
    angles: Angles,
    x: GridRows,
    weight_address: int,
    factors_address: int,
    out: GridRows,
    grad_weight_address: int,
) -> None: ...
def training_activate(
    is_bf16: bool,
    x_address: int,
    x_stride: int,
    grad_address: int,
    grad_stride: int,
    num_rows: int,
    width: int,
    activation: str,
    alpha: float,
    limit: float,
    out_address: int,
) -> None: ...
def training_cross_entropy(
    is_bf16: bool,
    logits_address: int,
    num_rows: int,
    width: int,
    bias_address: int,
    targets_address: int,
    divisor: float,
    losses_address: int,
) -> None: ...
def training_combine_gradient(
    is_bf16: bool,
    grad_address: int,
    grad_stride: int,
    y_address: int,
    weights_address: int,
    order_address: int,
    num_rows: int,
    top_k: int,
    width: int,
    grad_y_address: int,
    grad_weights_address: int,
) -> None: ...
def training_sum_rows(
    is_bf16: bool,
    x_address: int,
    x_stride: int,
    places_address: int,
    weights_address: int,
    num_tokens: int,
    top_k: int,
    width: int,
    out_address: int,
) -> None: ...
def adamw(
    values_address: int,
    grad_address: int,
    mean_address: int,
    square_address: int,
    count: int,
    step: int,
    scale: float,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None: ...

class GroupedProduct(enum.Enum):
    FORWARD = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2

def product(
    is_bf16: bool,
    a_address: int,
    a_row: int,
    a_step: int,
    b_address: int,
    b_step: int,
    b_column: int,
    out_address: int,
    out_row: int,
    num_rows: int,
    inner: int,
    columns: int,
    adds: bool,
    out_fp32: bool,
) -> None: ...
def grouped_product(
    is_bf16: bool,
    kind: GroupedProduct,
    x_address: int,
    y_address: int,
    weight_address: int,
    counts: list[int],
    inputs: int,
    outputs: int,
) -> None: ...
def causal_attention(
    is_bf16: bool,
    q: GridRows,
    k: GridRows,
    v: GridRows,
    first_keys_address: int,
    scale: float,
    key_dim: int,
    value_dim: int,
    out_address: int,
    lse_address: int,
) -> None: ...
def causal_gradient(
    is_bf16: bool,
    q: GridRows,
    k: GridRows,
    v: GridRows,
    first_keys_address: int,
    scale: float,
    key_dim: int,
    value_dim: int,
    out_address: int,
    lse_address: int,
    grad: GridRows,
    grad_q_address: int,
    grad_k_address: int,
    grad_v_address: int,
) -> None: ...
def choose_rows(logits_address: int, num_rows: int, width: int, stride: int, choices: bytes) -> list[int]: ...

class CallList:
    def __init__(self) -> None: ...
    def begin(self) -> None: ...
    @staticmethod
    def end() -> None: ...
    def mark(self) -> None: ...
    def __len__(self) -> int: ...
    def run(self, num_rows: int, times_address: int) -> None: ...

def count_kernel_time(counts: bool) -> None: ...
def kernel_time() -> tuple[int, int, int]: ...
