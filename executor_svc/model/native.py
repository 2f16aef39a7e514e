"""The decoder as one native call: its weights packed, its layers flattened into a list of operations."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import torch

from executor_svc.kv_cache import KVCache
from executor_svc.model.config import ModelConfig
from executor_svc.model.linear import Linear
from executor_svc.model.rope import cos_sin_table
from executor_svc.model.weights import LayerWeights, MoEWeights, Weights
from kernels import AttentionBatch
from kernels.native.library import ACTIVATIONS, LOGITS, Batch, Kind, Library, Op
from kernels.quantized_linear import QUANTIZED_DTYPES

HIDDEN, NORMED, QKV, ATTENDED, GATE_UP, GATED, BLOCK, HIDDEN_TAKEN, ATTENDED_TAKEN = range(9)
"""Buffers. HIDDEN is the residual stream, BLOCK a block's output where a norm stands before the stream."""
ROUTER, PAIRS, PAIRS_GATE_UP, PAIRS_GATED, PAIRS_OUT = range(9, 14)
"""Buffers of sparse layers: router logits; for each pair of a row and one of its experts what the MLP has."""


def obstacle(config: ModelConfig, weights: Weights) -> str | None:
    """What the model asks that the native step does not do; None when it does everything."""
    linears = [weights.lm_head, *(linear for layer in weights.layers for linear in layer.linears())]
    dtypes = {config.dtype, eight_bits(config)}
    if any(type(linear) is not Linear or linear.weight.dtype not in dtypes for linear in linears):
        return "a kind of linear layer"
    return None


def eight_bits(config: ModelConfig) -> torch.dtype | None:
    """What the library must have beside the model's dtype."""
    return None if config.quantization == "none" else QUANTIZED_DTYPES[config.quantization]


class NativeDecoder:
    """Does what `executor_svc.model.decoder.Decoder` does, with one call of `kernels.native` for a whole step.

    In every dtype a row's logits have the same bits in any company, in chunks of any length, on any number of threads.
    """

    def __init__(self, config: ModelConfig, weights: Weights, library: Library) -> None:
        """Takes the weights over: each matrix is packed and then let go of, so that none is held twice."""
        self.config, self.dtype, self.device = config, config.dtype, torch.device("cpu")
        self._library = library
        self._kept: list[torch.Tensor] = []
        self._memory = _Memory(_packed_bytes(library, weights))
        self._tables = {
            rope: self._keep(cos_sin_table(rope, config.head_dim, config.max_model_len))
            for rope in {layer.rope for layer in config.layers}
        }
        self._program = library.program(self._ops(weights), self._widths())

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed matrices."""
        return self._memory.size

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """The contract of `Decoder.forward`. Raises IndexError for what is out of range."""
        if cache.k[0].dtype != self.dtype:
            raise TypeError(f"a KV cache of {cache.k[0].dtype} for a model of {self.dtype}")
        if not len(token_ids) == len(positions) == len(slots):
            raise IndexError("token ids, positions and slots differ in number")
        if not len(batch.query_start) - 1 == len(batch.context_lens) == len(batch.block_tables):
            raise IndexError("query starts, contexts and block tables differ in number")
        num_blocks, block_size = cache.k[0].shape[:2]
        logits = torch.empty(len(logit_rows), self.config.vocab_size)
        tables = batch.block_tables.contiguous()
        layers = ctypes.c_void_p * self.config.num_layers
        held: dict[str, Any] = {
            "token_ids": token_ids.contiguous(),
            "positions": positions.long().contiguous(),
            "slots": slots.contiguous(),
            "logit_rows": logit_rows.contiguous(),
            "query_start": batch.query_start.contiguous(),
            "context_lens": batch.context_lens.contiguous(),
            "block_tables": tables,
            "logits": logits,
        }
        self._program.run(
            Batch(
                tokens=len(token_ids),
                rows=len(batch.context_lens),
                taken=len(logit_rows),
                table_stride=tables.shape[1],
                block_size=block_size,
                num_blocks=num_blocks,
                threads=torch.get_num_threads(),
                k_cache=ctypes.addressof(k := layers(*(layer.data_ptr() for layer in cache.k))),
                v_cache=ctypes.addressof(v := layers(*(layer.data_ptr() for layer in cache.v))),
                **{name: tensor.data_ptr() for name, tensor in held.items()},
            )
        )
        del k, v
        return logits

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor

    def _pointer(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self._keep(tensor.contiguous()).data_ptr()

    def _pack(self, weight: torch.Tensor) -> int:
        """Address of the packed copy."""
        target = self._memory.take(self._library.packed_size(*weight.shape), weight.dtype)
        self._library.pack(weight, target)
        return target.data_ptr()

    def _widths(self) -> list[int]:
        config = self.config
        attended = config.num_heads * config.head_dim
        qkv = attended + 2 * config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        widths = [hidden, hidden, qkv, attended, 2 * inner, inner, hidden, hidden, attended]
        if config.num_experts:
            widths += [config.num_experts, hidden, 2 * config.expert_size, config.expert_size, hidden]
        return widths

    def _ops(self, weights: Weights) -> list[Op]:
        """Empties `weights` on the way."""
        config = self.config
        tied = weights.lm_head.weight is weights.embedding
        size = {"n": config.vocab_size, "k": config.hidden_size}
        embedding = self._pack(weights.embedding)
        lm_head = embedding if tied else self._pack(weights.lm_head.weight)
        weights.embedding = weights.lm_head.weight = torch.empty(0)
        ops = [Op(kind=Kind.EMBED, output=HIDDEN, weight=embedding, scale=config.embedding_scale, **size)]
        for index in range(config.num_layers):
            ops += self._layer(index, weights.layers.pop(0))
        ops.append(self._norm(HIDDEN_TAKEN, NORMED, weights.norm))
        ops.append(Op(kind=Kind.LINEAR, input=NORMED, output=LOGITS, weight=lm_head, scale=1.0, **size))
        if config.logit_divisor != 1.0:
            ops.append(Op(kind=Kind.DIVIDE, output=LOGITS, scale=config.logit_divisor, **size))
        if config.logit_softcap:
            ops.append(Op(kind=Kind.SOFTCAP, output=LOGITS, softcap=config.logit_softcap, **size))
        last = next(place for place, op in enumerate(ops) if op.kind == Kind.TAKE_ROWS)
        for op in ops[last:]:
            op.taken = 1
        return ops

    def _layer(self, index: int, layer: LayerWeights) -> list[Op]:
        config = self.config
        ops, source = self._read(HIDDEN, layer.input_norm)
        ops.append(self._linear(source, QKV, layer.qkv))
        if layer.q_norm is not None and layer.k_norm is not None:
            keys = config.num_heads * config.head_dim
            counts = (1, 1) if config.wide_qk_norm else (config.num_heads, config.num_kv_heads)
            ops.append(self._norm(QKV, QKV, layer.q_norm, count=counts[0]))
            ops.append(self._norm(QKV, QKV, layer.k_norm, count=counts[1], offset=keys))
        ops += self._attention(index, layer.sinks)
        hidden, attended = HIDDEN, ATTENDED
        if index == config.num_layers - 1:  # behind the last attention only these rows matter
            hidden, attended = HIDDEN_TAKEN, ATTENDED_TAKEN
            ops.append(Op(kind=Kind.TAKE_ROWS, input=HIDDEN, output=hidden))
            ops.append(Op(kind=Kind.TAKE_ROWS, input=ATTENDED, output=attended))
        ops += self._join(attended, hidden, layer.o, layer.post_attention_norm)
        read, source = self._read(hidden, layer.pre_mlp_norm)
        ops += read
        if layer.moe is not None:
            return [*ops, *self._mixture(source, layer.moe), *self._add(hidden, layer.post_mlp_norm)]
        assert layer.gate_up is not None and layer.down is not None
        activation = ACTIVATIONS[config.activation]
        ops.append(self._linear(source, GATE_UP, layer.gate_up))
        ops.append(Op(kind=Kind.GATED, input=GATE_UP, output=GATED, flag=activation))
        return ops + self._join(GATED, hidden, layer.down, layer.post_mlp_norm)

    def _mixture(self, source: int, moe: MoEWeights) -> list[Op]:
        """A sparse layer's MLP, into BLOCK: pairs of a row and one of its experts, sorted by expert; then their sum."""
        config, each = self.config, self.config.experts_per_token
        route = {"experts": config.num_experts, "count": each, "flag": int(config.renormalize_experts)}
        gate_up = self._experts(PAIRS, PAIRS_GATE_UP, moe.gate_up, moe.gate_up_bias)
        down = self._experts(PAIRS_GATED, PAIRS_OUT, moe.down, moe.down_bias)
        moe.gate_up = moe.down = torch.empty(0)
        activation = ACTIVATIONS[config.activation]
        return [
            self._linear(source, ROUTER, moe.router),
            Op(kind=Kind.ROUTE, input=ROUTER, output=ROUTER, **route),
            Op(kind=Kind.GROUP),
            Op(kind=Kind.EXPAND, input=source, output=PAIRS, pairs=each),
            gate_up,
            Op(kind=Kind.GATED, input=PAIRS_GATE_UP, output=PAIRS_GATED, flag=activation, pairs=each),
            down,
            Op(kind=Kind.COMBINE, input=PAIRS_OUT, output=BLOCK),
        ]

    def _experts(self, source: int, target: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Op:
        """weight: [E, outputs, inputs]; bias: [E, outputs] or None."""
        experts, outputs, inputs = weight.shape
        packed = [self._pack(expert) for expert in weight]
        return Op(
            kind=Kind.EXPERTS,
            input=source,
            output=target,
            experts=experts,
            pairs=self.config.experts_per_token,
            n=outputs,
            k=inputs,
            weight=packed[0],
            bias=self._pointer(bias),
        )

    def _attention(self, index: int, sinks: torch.Tensor | None) -> list[Op]:
        config, layer = self.config, self.config.layers[index]
        shape = {
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "layer": index,
        }
        table = self._tables[layer.rope]
        rotary = {"table": table.data_ptr(), "n": len(table), "rotary": table.shape[1]}
        return [
            Op(kind=Kind.ROPE_AND_CACHE, input=QKV, output=QKV, **rotary, **shape),
            Op(
                kind=Kind.ATTENTION,
                input=QKV,
                output=ATTENDED,
                window=layer.window,
                scale=config.attention_scale,
                softcap=config.attention_softcap,
                weight=self._pointer(sinks),
                **shape,
            ),
        ]

    def _read(self, stream: int, norm: torch.Tensor | None) -> tuple[list[Op], int]:
        """What a block reads of the residual stream: operations, and the buffer that holds it then."""
        return ([], stream) if norm is None else ([self._norm(stream, NORMED, norm)], NORMED)

    def _join(self, source: int, stream: int, linear: Linear, post_norm: torch.Tensor | None) -> list[Op]:
        """A block's last linear layer, added to the residual stream."""
        if post_norm is None:
            return [self._linear(source, stream, linear, add=True, scale=self.config.residual_scale)]
        return [self._linear(source, BLOCK, linear), *self._add(stream, post_norm)]

    def _add(self, stream: int, post_norm: torch.Tensor | None) -> list[Op]:
        """Adds BLOCK to the residual stream."""
        scale = self.config.residual_scale
        ops = [] if post_norm is None else [self._norm(BLOCK, BLOCK, post_norm)]
        if scale != 1.0:
            ops.append(Op(kind=Kind.SCALE, input=BLOCK, output=BLOCK, scale=scale))
        return [*ops, Op(kind=Kind.ADD, input=BLOCK, output=stream)]

    def _linear(self, source: int, target: int, linear: Linear, *, add: bool = False, scale: float = 1.0) -> Op:
        outputs, inputs = linear.weight.shape
        quantized = linear.weight.dtype != self.dtype
        weight = self._pack(linear.weight)
        linear.weight = torch.empty(0)
        return Op(
            kind=Kind.LINEAR,
            input=source,
            output=target,
            flag=int(add),
            scale=scale,
            n=outputs,
            k=inputs,
            eight_bits=int(quantized),
            weight=weight,
            bias=self._pointer(linear.bias),
            table=self._pointer(linear.scale),
        )

    def _norm(self, source: int, target: int, weight: torch.Tensor, *, count: int = 1, offset: int = 0) -> Op:
        config = self.config
        return Op(
            kind=Kind.NORM,
            input=source,
            output=target,
            offset=offset,
            count=count,
            k=len(weight),
            eps=config.rms_norm_eps,
            flag=int(config.unit_offset_norms),
            weight=self._pointer(weight),
        )


class _Memory:
    """One region for all packed matrices, in large pages where the system has them: it is read whole at every step."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Private: shared memory gets no large pages.
        self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # a system without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._taken = 0

    def take(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The next [elements] of the region."""
        found = torch.frombuffer(self._map, dtype=dtype, count=elements, offset=self._taken)
        self._taken += elements * dtype.itemsize
        return found


def _packed_bytes(library: Library, weights: Weights) -> int:
    matrices = [weights.embedding]
    if weights.lm_head.weight is not weights.embedding:
        matrices.append(weights.lm_head.weight)
    for layer in weights.layers:
        matrices += [linear.weight for linear in layer.linears()]
        if layer.moe is not None:
            matrices += [layer.moe.router.weight, *layer.moe.gate_up, *layer.moe.down]
    return sum(library.packed_size(*matrix.shape) * matrix.dtype.itemsize for matrix in matrices)
