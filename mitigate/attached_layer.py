"""One attention layer with a variant attached: it makes the summaries and attends over ``[summaries | exact tokens]`` in one joint softmax.

The layer's own projections, norms and rotary module are used as they stand; only what the attention reads is replaced.
Shapes: B batch, T tokens, N summaries, M summaries and exact tokens, A chosen positions, R rows of the batch, P bypassed tokens, C hidden width, H query heads,
G kv heads, D head dim, V the values' head dim, F whatever a row holds.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from mitigate.attachable import UnsupportedModel
from mitigate.cache import Banks, PaddedCacheLayer, SummaryCacheLayer, VariantCacheLayer
from mitigate.call import Call
from mitigate.compressor import Compressor, Pooled
from mitigate.config import VariantConfig
from mitigate.geometry import Grid
from mitigate.kernels import blocked, ops, reference

NAME = "mitigate"  # key in transformers' attention and mask registries
ROUNDING = 0.05  # of the largest number, by which keys made twice may differ in any precision; one made otherwise is far off
BLOCKED_FROM = 48  # tokens from which the blocked path beats one dense masked call (forward and backward, CPU: level at 40, 1.2x at 64, 1.7x at 128)


class AttachedLayer:
    """What one attention module needs while a variant is attached."""

    def __init__(self, module: Any, rotary: nn.Module, compressor: Compressor, variant: VariantConfig, phases: tuple[int, ...], call: Call) -> None:
        self.module, self.rotary, self.compressor, self.call = module, rotary, compressor, call
        self.grid: Grid = compressor.grid
        self.variant, self.local = variant, variant.local_window
        self.phases = phases
        self.rope_position = variant.rope_position
        norm = getattr(module, "k_norm", None)
        self._normalise_tokens = norm if variant.key_norm == "tokens" else None
        self._normalise_pooled = norm if variant.key_norm == "pooled" else None
        self.collect: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.queries: torch.Tensor | None = None  # positions whose output is wanted in an uncached forward; None for all
        self._hidden: torch.Tensor | None = None
        self._key: torch.Tensor | None = None
        self._cache: VariantCacheLayer | None = None
        self._pads: tuple[int, ...] | None = None
        self._proven = False  # whether the layer's own keys and values were found to be what summaries are made of
        self.hooked: nn.Module | None = None  # the k_proj that calls `after_key`

    @property
    def device(self) -> torch.device:
        """Where the layer's weights are; its compressor and its state stay with them."""
        return self.module.k_proj.weight.device

    # -- summaries ------------------------------------------------------------------------------------------------------------------------------

    def _finish(self, pooled: Pooled, window0: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Key norm, then RoPE at the summary's position: [B, G, N, D]."""
        key_BNGD = pooled.key
        if self._normalise_pooled is not None:
            key_BNGD = self._normalise_pooled(key_BNGD)
        if getattr(self.module, "use_rope", True):
            cos, sin = self._rotation(key_BNGD, window0, key_BNGD.shape[1])
            key_BNGD = self._rotated(key_BNGD, cos, sin)
        return key_BNGD.transpose(1, 2), None if pooled.value is None else pooled.value.transpose(1, 2)

    def _rotated(self, key_BNGD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotate = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        rotated: torch.Tensor = rotate(key_BNGD[:0], key_BNGD, cos, sin, unsqueeze_dim=2)[1]
        return rotated

    def _rotation(self, like: torch.Tensor, window0: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = {"last_stride": self.grid.window - self.grid.stride, "window_start": 0, "window_end": self.grid.window - 1}[self.rope_position]
        first = self.grid.origin + window0 * self.grid.stride + shift
        # A position before token 0 does not exist; the first token stands for it.
        position_1N = (first + self.grid.stride * torch.arange(count, device=like.device)).clamp(min=0)[None]
        cos, sin = self.rotary(like, position_1N)
        return cos, sin

    def _pooled(self, hidden_BTC: torch.Tensor, key_BTF: torch.Tensor, value_BTF: torch.Tensor, **which: int) -> Pooled:
        biases = {"key_bias": getattr(self.module.k_proj, "bias", None), "value_bias": getattr(self.module.v_proj, "bias", None)}
        pooled: Pooled = self.compressor(hidden_BTC, key_BTF, value_BTF, **which, **biases, normalise=self._normalise_tokens)
        return pooled

    def summarise_rows(self, hidden_BTC: torch.Tensor, *, row0: int, window0: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Summaries of windows from hidden rows alone, projecting them here: the cached path."""
        projected = self.module.k_proj(hidden_BTC), self.module.v_proj(hidden_BTC)
        pooled = self._pooled(hidden_BTC, *projected, row0=row0, window0=window0, count=count)
        self._key = None  # k_proj's hook fired for the rows
        return self._finish(pooled, window0)

    # -- hooks ----------------------------------------------------------------------------------------------------------------------------------

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pre-hook of the attention module: stash the hidden states, or hand them to this layer's cache. RoPE is made again where pads were counted."""
        self._hidden = self._key = self._cache = self._pads = None
        hidden_BTC = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._check_call(kwargs)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        layer = self._take_over(cache) if cache is not None else None
        past = layer.length if layer is not None else 0
        known = layer.pads if isinstance(layer, PaddedCacheLayer) and past else None
        if self.module.layer_idx == 0:
            self.call.forget()
        layout = self.call.layout(kwargs.get("attention_mask"), kwargs.get("position_ids"), past, (hidden_BTC.shape[0], hidden_BTC.shape[1]), known)
        self._check_length(past + hidden_BTC.shape[1] - min(layout.pads or (0,)))
        if layout.pads is not None and (self.queries is not None or self.collect is not None):
            raise UnsupportedModel("attach: chosen query positions and collected gates need rows of one length; run them without left padding")
        if layer is not None:
            if layout.right:
                raise UnsupportedModel("attach: right padding in a cached call is not supported; pad on the left, or run rows of one length together")
            if cache is not None and layout.pads is not None and not isinstance(layer, PaddedCacheLayer):
                layer = cache.layers[int(self.module.layer_idx)] = PaddedCacheLayer(self)
            layer.expect(hidden_BTC, layout.pads)
        self._hidden, self._cache, self._pads = hidden_BTC, layer, layout.pads
        if layout.positions_BT is None:
            return None
        return args, kwargs | {"position_embeddings": self.rotary(hidden_BTC, layout.positions_BT.to(hidden_BTC.device))}

    def _check_call(self, kwargs: dict[str, Any]) -> None:
        chosen = self.module.config._attn_implementation
        if chosen.startswith("paged"):
            raise UnsupportedModel(f"attach: continuous batching ({chosen}) keeps paged caches, which cannot carry summaries; use generate on a batch")
        if self.module.k_proj is not self.hooked:
            raise UnsupportedModel(f"attach: k_proj of layer {self.module.layer_idx} was replaced while a variant is attached; attach after such changes")
        if chosen != NAME:
            raise UnsupportedModel(f"attach: attn_implementation was set to {chosen!r} while a variant is attached, which would run without it; detach first")
        if kwargs.get("cu_seq_lens_q") is not None:
            raise UnsupportedModel("attach: packed sequences are not supported (cu_seq_lens_q is set); give each its own row")

    def _check_length(self, tokens: int) -> None:
        limit = getattr(self.module.config, "max_position_embeddings", None)
        if limit is not None and tokens > limit:
            raise UnsupportedModel(
                f"attach: {tokens} tokens are beyond the model's max_position_embeddings of {limit}; shorten the context, or raise that field of its config"
            )

    def after_key(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Hook of k_proj: its output is the key before norm and RoPE."""
        self._key = output

    def _take_over(self, cache: Any) -> VariantCacheLayer:
        index = int(self.module.layer_idx)
        if not hasattr(cache, "layers"):
            raise UnsupportedModel(f"attach: {type(cache).__name__} has no layers (paged caches cannot carry summaries); use a DynamicCache")
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        layer = cache.layers[index]
        if isinstance(layer, VariantCacheLayer):
            if layer.owner is not self:
                raise UnsupportedModel("attach: this cache was filled under another variant; start with an empty one")
            return layer
        if type(layer) is not DynamicLayer:
            raise UnsupportedModel(f"attach: cache layer {index} is a {type(layer).__name__}; a variant needs a DynamicCache")
        if layer.is_initialized:
            raise UnsupportedModel(f"attach: cache layer {index} already holds tokens of the unmodified model; start with an empty cache")
        cache.layers[index] = SummaryCacheLayer(self)
        return cache.layers[index]

    @torch.no_grad()
    def _prove(self, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor) -> None:
        """Once: the first tokens' keys and values, made of the layer's parts as summaries are, must be those that the layer itself gives its attention.

        A family may scale, clamp or normalise them in code that no name gives away, or leave RoPE out in some layers.

        Raises:
            UnsupportedModel: they are not.
        """
        adapted = self.module.training and any(True for _ in self.module.k_proj.children())  # whose dropout draws again
        if adapted or self._hidden is None or self._pads is not None or torch.compiler.is_compiling():
            return
        count, past = min(k_BGTD.shape[2], 4), 0 if self._cache is None else self._cache.length - k_BGTD.shape[2]
        if count == 0 or k_BGTD.shape[0] == 0:
            return
        kept, hidden = self._key, self._hidden[:1, :count]
        key, value = (projected.unflatten(-1, (k_BGTD.shape[1], -1)) for projected in (self.module.k_proj(hidden), self.module.v_proj(hidden)))
        self._key = kept  # k_proj's hook fired
        norm = getattr(self.module, "k_norm", None)
        key = key if norm is None else norm(key)
        if getattr(self.module, "use_rope", True):
            key = self._rotated(key, *self.rotary(key, torch.arange(past, past + count, device=key.device)[None]))
        for name, made, own in (("keys", key, k_BGTD), ("values", value, v_BGTD)):
            own_BTGD = own[:1, :, :count].transpose(1, 2).float()
            far = float((made.float() - own_BTGD).abs().max())
            if far > ROUNDING * float(own_BTGD.abs().max()) and bool(own_BTGD.isfinite().all()):
                raise UnsupportedModel(
                    f"attach: layer {self.module.layer_idx} of {type(self.module).__name__} gives its attention other {name} than its projections, key norm "
                    "and RoPE make, of which summaries are made"
                )
        self._proven = True

    # -- attention ------------------------------------------------------------------------------------------------------------------------------

    def attention(self, q_BHTD: torch.Tensor, k_BGMD: torch.Tensor, v_BGMD: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend over [summaries | exact tokens]; returns [B, T, H, D], zeros at left pads. Clears the stash whatever happens."""
        if not self._proven:
            own = slice(k_BGMD.shape[2] - q_BHTD.shape[2], None)  # over a cache, the call's own tokens come last
            self._prove(k_BGMD[:, :, own], v_BGMD[:, :, own])
        hidden, key, cache, pads = self._hidden, self._key, self._cache, self._pads
        self._hidden = self._key = self._cache = self._pads = None
        if cache is None:
            if pads is None:
                return self._whole_sequence(hidden, key, q_BHTD, k_BGMD, v_BGMD, scale)
            return self._padded_sequence(hidden, key, (q_BHTD, k_BGMD, v_BGMD), pads, scale)
        if isinstance(cache, SummaryCacheLayer):
            return self._continued(q_BHTD, k_BGMD, v_BGMD, cache.take_banks(), cache.length, scale)
        assert isinstance(cache, PaddedCacheLayer)
        parts = [
            (e.rows, e.skip, self._continued(q_BHTD[e.rows][:, :, e.skip :], e.keys, e.values, e.banks, e.length, scale))  # of rows that began
            for e in cache.take_entries()
        ]
        return _joined(parts, q_BHTD)

    def _continued(self, q_BHTD: torch.Tensor, k_BGMD: torch.Tensor, v_BGMD: torch.Tensor, banks: Banks | None, seen: int, scale: float) -> torch.Tensor:
        """The last T of `seen` tokens over what a cache layer gave: [B, T, H, D]."""
        length = q_BHTD.shape[2]
        if banks is not None:
            return self._over_banks(q_BHTD, banks, seen, scale)
        # One query sees all that is held: summaries up to it, its exact interval, the bypassed tokens.
        mask = None if length == 1 else self._mask(seen - length, length, q_BHTD.shape[1] // k_BGMD.shape[1], q_BHTD)
        return blocked.attend(q_BHTD, k_BGMD, v_BGMD, mask, scale).transpose(1, 2)

    def _over_banks(self, q_BHTD: torch.Tensor, banks: Banks, seen: int, scale: float) -> torch.Tensor:
        """`_continued` by operators: one token by `decode`, several by `attend`."""
        grid = self.grid
        options: dict[str, Any] = {"window": grid.window, "stride": grid.stride, "origin": grid.origin, "local": self.local, "scale": scale}
        q_BTHD = q_BHTD.transpose(1, 2)
        (ks, vs), (kb, vb), (k, v) = (tuple(x.transpose(1, 2) for x in pair) for pair in (banks.summary, banks.bypass, banks.exact))
        if q_BTHD.shape[1] == 1:
            return ops.decode(q_BTHD[:, 0], ks, vs, k, v, **options, position=seen - 1, kb_BPGD=kb, vb_BPGV=vb)[:, None]
        # The bank also takes the bypassed tokens that are still exact: a later query of this call may be past their interval.
        positions = torch.arange(seen, device=k.device)
        positions = positions[reference.is_bypassed(positions, stride=grid.stride, origin=grid.origin, phases=self.phases)]
        late = positions[kb.shape[1] :] - banks.first
        bank: dict[str, Any] = {"kb_BPGD": torch.cat([kb, k[:, late]], dim=1), "vb_BPGV": torch.cat([vb, v[:, late]], dim=1), "pos_b": positions}
        return ops.attend(q_BTHD, ks, vs, k, v, **options, **bank, k_start=banks.first)[0]

    def _padded_sequence(self, hidden: Any, key: Any, qkv: tuple[torch.Tensor, ...], pads: tuple[int, ...], scale: float) -> torch.Tensor:
        """Rows with equally many left pads together, over their live columns alone."""
        if hidden is None or key is None:
            raise UnsupportedModel("attach: the attention ran without its hidden states; call the model, not the attention function")
        parts = []
        for pad in sorted({pad for pad in pads if pad < hidden.shape[1]}):
            rows = torch.tensor([row for row, own in enumerate(pads) if own == pad], device=hidden.device)
            q_RHTD, k_RGTD, v_RGTD = (x[rows][:, :, pad:] for x in qkv)
            parts.append((rows, pad, self._whole_sequence(hidden[rows][:, pad:], key[rows][:, pad:], q_RHTD, k_RGTD, v_RGTD, scale)))
        return _joined(parts, qkv[0])

    def _whole_sequence(self, hidden: Any, key: Any, q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, scale: float) -> torch.Tensor:
        ks_BGND, vs_BGND = self._summaries(hidden, key, k_BGTD, v_BGTD)
        if ops.operated(q_BHTD.device):
            return self._by_operator([x.transpose(1, 2) for x in (q_BHTD, ks_BGND, vs_BGND, k_BGTD, v_BGTD)], scale)
        length, repeat = q_BHTD.shape[2], q_BHTD.shape[1] // k_BGTD.shape[1]
        in_order = self.queries is None or bool((self.queries[1:] >= self.queries[:-1]).all())
        if length >= BLOCKED_FROM and in_order:
            plan = self._plan(length, repeat, q_BHTD)
            q_BHAD = q_BHTD if self.queries is None else q_BHTD[:, :, self.queries]
            out_BHAD = blocked.attend_blocked(q_BHAD, ks_BGND, vs_BGND, k_BGTD, v_BGTD, plan, scale)
        else:
            k_BGMD, v_BGMD = torch.cat([ks_BGND, k_BGTD], dim=2), torch.cat([vs_BGND, v_BGTD], dim=2)
            mask = self._mask(0, length, repeat, q_BHTD)
            if self.queries is None:
                q_BHAD = q_BHTD
            else:
                q_BHAD = q_BHTD[:, :, self.queries]
                mask = mask.unflatten(0, (repeat, length))[:, self.queries].flatten(0, 1)
            out_BHAD = blocked.attend(q_BHAD, k_BGMD, v_BGMD, mask, scale)
        out_BAHD = out_BHAD.transpose(1, 2)
        return out_BAHD if self.queries is None else spread(out_BAHD, self.queries, length)

    def _by_operator(self, parts: list[torch.Tensor], scale: float) -> torch.Tensor:
        """Queries from the first one asked for on; [B, T, H, D] with zeros where nobody asked."""
        q_BTHD, ks_BNGD, vs_BNGD, k_BTGD, v_BTGD = parts
        grid, length = self.grid, k_BTGD.shape[1]
        first = 0 if self.queries is None else int(self.queries.min())
        position = torch.arange(length, device=k_BTGD.device)
        position = position[reference.is_bypassed(position, stride=grid.stride, origin=grid.origin, phases=self.phases)]
        out_BAHD, _ = ops.attend(
            q_BTHD[:, first:],
            ks_BNGD,
            vs_BNGD,
            k_BTGD,
            v_BTGD,
            window=grid.window,
            stride=grid.stride,
            origin=grid.origin,
            local=self.local,
            scale=scale,
            kb_BPGD=k_BTGD[:, position],
            vb_BPGV=v_BTGD[:, position],
            pos_b=position,
        )
        return out_BAHD if self.queries is None else spread(out_BAHD[:, self.queries - first], self.queries, length)

    def _summaries(self, hidden: Any, key: Any, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden is None or key is None:
            raise UnsupportedModel("attach: the attention ran without its hidden states; call the model, not the attention function")
        count = self.grid.num_windows(k_BGTD.shape[2])
        if count == 0:
            return k_BGTD[:, :, :0], v_BGTD[:, :, :0]
        value = v_BGTD.transpose(1, 2).flatten(2)
        pooled = self._pooled(hidden, key, value, row0=0, window0=0, count=count)
        if self.collect is not None:
            self.collect[:] = [(pooled.key_gates, pooled.value_gates)]
        summary_key, summary_value = self._finish(pooled, 0)
        return summary_key, summary_key if summary_value is None else summary_value

    def _plan(self, length: int, repeat: int, like: torch.Tensor) -> blocked.Plan:
        grid = self.grid
        return blocked.plan(
            length,
            window=grid.window,
            stride=grid.stride,
            origin=grid.origin,
            local=self.local,
            bypass=self.phases,
            repeat=repeat,
            like=like,
            queries=None if self.queries is None else self.queries.tolist(),
        )

    def _mask(self, past: int, length: int, repeat: int, like: torch.Tensor) -> torch.Tensor:
        grid, device = self.grid, like.device

        def made() -> torch.Tensor:
            first = grid.stored_exact_lo(past, self.local) if past else 0
            older = torch.arange(first, device=device)
            older = older[reference.is_bypassed(older, stride=grid.stride, origin=grid.origin, phases=self.phases)]
            visible_TM = reference.visible(
                torch.arange(past, past + length, device=device),
                torch.cat([older, torch.arange(first, past + length, device=device)]),
                grid.num_windows(past + length),
                window=grid.window,
                stride=grid.stride,
                origin=grid.origin,
                local=self.local,
                bypass=self.phases,
            )
            return blocked.additive_mask(visible_TM, repeat, like.dtype)

        with torch.inference_mode(False):  # a kept mask must also serve a later backward pass
            return self.call.mask((grid, self.local, self.phases, past, length, repeat, like.dtype, device), made)


def spread(x_BAF: torch.Tensor, positions_A: torch.Tensor, length: int) -> torch.Tensor:
    """Rows back at their positions among `length`, zeros elsewhere: [B, A, ...] -> [B, T, ...]."""
    full = x_BAF.new_zeros(x_BAF.shape[0], length, *x_BAF.shape[2:])
    return full.index_copy(1, positions_A.to(full.device), x_BAF)


def _joined(parts: list[tuple[torch.Tensor, int, torch.Tensor]], q_BHTD: torch.Tensor) -> torch.Tensor:
    """Outputs [R, T - skip, H, D] of some rows each, from their column `skip` on, in one [B, T, H, D]; zeros elsewhere."""
    batch, heads, length, dim = q_BHTD.shape
    like = parts[0][2] if parts else q_BHTD
    out_BTHD = like.new_zeros(batch, length, heads, like.shape[-1] if parts else dim)
    for rows, skip, part in parts:
        out_BTHD[rows, skip:] = part
    return out_BTHD
