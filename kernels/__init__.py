"""Device code of Gilir: Triton kernels, each beside its plain torch reference.

Every function dispatches by device: tensors on a GPU go to the Triton kernel, tensors on the CPU to torch.
"""

from kernels.attention import AttentionBatch, paged_attention, split_keys_for
from kernels.attention_shape import check_attention_shape
from kernels.block_copy import copy_blocks
from kernels.gated_activation import gelu_tanh_mul, silu_mul
from kernels.invariant_linear import invariant_linear
from kernels.logprobs import token_logprobs
from kernels.moe import moe_mlp, route_topk
from kernels.penalties import apply_penalties
from kernels.philox import gumbel_noise, philox4x32
from kernels.quantized_linear import quantize_weight, quantized_linear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope_and_cache
from kernels.sampling import SamplingColumns, sample
from kernels.token_mask import mask_tokens

__all__ = [
    "AttentionBatch",
    "SamplingColumns",
    "add_rms_norm",
    "apply_penalties",
    "check_attention_shape",
    "copy_blocks",
    "gelu_tanh_mul",
    "gumbel_noise",
    "invariant_linear",
    "mask_tokens",
    "moe_mlp",
    "paged_attention",
    "philox4x32",
    "quantize_weight",
    "quantized_linear",
    "rms_norm",
    "rope_and_cache",
    "route_topk",
    "sample",
    "silu_mul",
    "split_keys_for",
    "token_logprobs",
]
