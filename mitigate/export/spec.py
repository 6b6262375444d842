"""`SPEC.md`: the equations of one exported compressor with its numbers, numbered so that a port can be checked line by line."""

from __future__ import annotations

from typing import Any


def render(spec: dict[str, Any]) -> str:
    """The text for a `compressor.json`."""
    parts = [_head(spec), _windows(spec), _gate(spec), _payload(spec), _finish(spec), _visibility(spec), _attention(spec), _state(spec), _proof(spec)]
    return "\n\n".join(parts) + "\n"


def _head(spec: dict[str, Any]) -> str:
    base = spec["base"]
    return f"""# {spec["label"]}: how to rebuild this compressor

Generated from `compressor.json`, which holds the same as data. `reference.py` computes all of it in plain PyTorch.

The model is a {base["architecture"]} with {base["layers"]} layers, hidden width C = {base["hidden"]}, {base["heads"]} query heads,
G = {base["kv_heads"]} KV head(s) of D = {base["head_dim"]} dims; query head h reads KV head h // {base["heads"] // base["kv_heads"]}.
Its weights, all of them changed in training, are in `model.safetensors`;
the compressor's own are in `compressor.safetensors`. Positions t count tokens from 0; there is no padding."""


def _windows(spec: dict[str, Any]) -> str:
    shared = _by_layer("W − S", [grid["window"] - grid["stride"] for grid in spec["layers"]])
    rows = "\n".join(
        f"| {i} | {grid['window']} | {grid['stride']} | {grid['origin']} | {grid['origin'] + grid['window'] - 1} | {_phases(grid)} |"
        for i, grid in enumerate(spec["layers"])
    )
    return f"""## 1. Windows

1.1 Window j of a layer covers the W tokens o + j S + i, i = 0 … W−1; W, S and o are the layer's own.
Tokens before 0 do not exist; a window that begins there is short.

| layer | W | S | o | first window ends at | phases (t − o) mod S that stay exact for good |
|---|---|---|---|---|---|
{rows}

1.2 Summaries that exist once `length` tokens were seen: n = max(0, floor((length − o − W) / S) + 1); floor rounds down, also below zero.

1.3 Neighbouring windows share {shared} tokens. Between calls keep the hidden states of open windows: from token max(0, o + n S) on."""


def _by_layer(term: str, values: list[int]) -> str:
    """'W − S = 4' where all layers agree, else 'W − S (4 in layers 0, 2; 8 in layer 1)'."""
    where = {value: [str(i) for i, other in enumerate(values) if other == value] for value in values}
    if len(where) == 1:
        return f"{term} = {values[0]}"
    parts = [f"{value} in layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}" for value, layers in where.items()]
    return f"{term} ({'; '.join(parts)})"


def _phases(grid: dict[str, Any]) -> str:
    return ", ".join(str(phase) for phase in grid["bypass_phases"]) or "none"


def _gate(spec: dict[str, Any]) -> str:
    gate, base, windows = spec["gate"], spec["base"], {grid["window"] for grid in spec["layers"]}
    if gate["kind"] == "uniform":
        return """## 2. Gate

2.1 The gate is uniform: α[j, i] = 1 / (number of offsets of window j that exist). Dividing by W is wrong in a short window."""
    weight = "Z_i is row i of `gate.weight`" if gate["per_offset"] else "one Z serves every offset (`gate.weight` has one row)"
    bias = "b_i is row i of `gate.bias`" if gate["bias"] else "there is no bias"
    channel = f"each of the {base['head_dim']} channels of a KV head has a gate of its own" if gate["granularity"] == "channel" else "one weight per KV head"
    columns = base["kv_heads"] * (base["head_dim"] if gate["granularity"] == "channel" else 1)
    rows = str(max(windows)) if len(windows) == 1 else "W"
    own = ", W being the layer's own" if gate["per_offset"] and len(windows) > 1 else ""
    shared = (
        "Keys and values share the gate `layers.{i}.k.gate.*`." if gate["shared_by_key_and_value"] else "Keys use `layers.{i}.k.gate.*`, values `…v.gate.*`."
    )
    return f"""## 2. Gate

2.1 s[j, i] = h[o + j S + i] · Z_i + b_i, where h are {gate["input"]}; {weight}, {bias}.

2.2 `gate.weight` is [{rows if gate["per_offset"] else 1}, {base["hidden"]}, {columns}]{own}, columns in the order (KV head, gate channel): {channel}.

2.3 α[j, ·] = softmax of s[j, ·] over the offsets that exist, in fp32 or wider, temperature 1. Offsets of tokens before 0 get −∞, not 0.

2.4 {shared}"""


def _payload(spec: dict[str, Any]) -> str:
    payload = spec["payload"]
    if payload["per_offset"]:
        source = "u[j, i] = h[o + j S + i] · C_i, C_i being row i of `layers.{i}.k.payload.weight`" + (
            "" if payload["value"] == "key_summary" else " for keys and of `layers.{i}.v.payload.weight` for values"
        )
    else:
        source = "u[j, i] is the layer's own key (value) projection of token o + j S + i"
    pooled_norm = spec["norm"]["place"] == "pooled"
    first = "" if pooled_norm else "Each token's key is RMS-normalised first (4.1). "
    return f"""## 3. Payload and pooling

3.1 {source}, before RoPE{" and before the key norm" if pooled_norm else ""}.

3.2 {first}pooled[j] = Σ_i α[j, i] ⊙ u[j, i], summed in fp32 or wider."""


def _finish(spec: dict[str, Any]) -> str:
    norm, rope, base = spec["norm"], spec["rope"], spec["base"]
    value = (
        "The finished key, normalised and rotated, is the value too. It is held once; the attention's output is not rotated back."
        if spec["payload"]["value"] == "key_summary"
        else "The pooled value is the summary's value as it is: no norm, no rotation."
    )
    where = "the pooled key" if norm["place"] == "pooled" else "each token's key before it is pooled, and never the pooled key"
    shapes = [(grid["window"], grid["stride"]) for grid in spec["layers"]]
    examples = "; ".join(_positions(i, grid) for i, grid in enumerate(spec["layers"]) if shapes.index(shapes[i]) == i)
    angle = f"position × {base['rope']['theta']:g}^(−2d/{base['head_dim']})"
    return f"""## 4. Norm, RoPE, value

4.1 The model's own key norm acts on {where}: x ↦ w ⊙ x / sqrt(mean(x²) + {norm["eps"]:g}) over the D dims of a head, w = `{norm["tensor"]}`.

4.2 The key is then rotated to position {rope["position"]}: {examples}.
The last term, by the layer's own W and S, is the layer's `key_shift` in `compressor.json`.

4.3 RoPE, half style: dims d and d + {base["head_dim"] // 2} turn together by {angle}; all dims, no scaling.

4.4 {value}"""


def _positions(layer: int, grid: dict[str, Any]) -> str:
    first, second = (max(0, grid["origin"] + j * grid["stride"] + grid["key_shift"]) for j in (0, 1))
    return f"token {first} for layer {layer}'s first summary, {second} for its second"


def _visibility(spec: dict[str, Any]) -> str:
    local = spec["exact"]["local_window"]
    bypass = any(grid["bypass_phases"] for grid in spec["layers"])
    kept = ", or the token's phase is one that stays exact for good (1.1)" if bypass else ""
    return f"""## 5. What the query at t sees

5.1 Summary j iff o + j S + W − 1 ≤ t: a window that ends at t is visible to t itself.

5.2 covered(t) = o + (n − 1) S + W with n the summaries visible at t, or 0 if n = 0: the first token that no completed window covers.

5.3 Exact token i iff i ≤ t and i ≥ min(t − {local} + 1, covered(t)){kept}. L = {local}, the query's own token counts as one of them.

5.4 A token may be seen exactly and in summaries at once."""


def _attention(spec: dict[str, Any]) -> str:
    return f"""## 6. Attention

6.1 One softmax over all visible summaries and exact tokens together, scale {spec["attention"]["scale"]:.9g}, no sink, no bias for either kind.

6.2 Exact keys are normalised and rotated to their own positions as in the unmodified model; queries too. Everything else in the model is unchanged."""


def _state(spec: dict[str, Any]) -> str:
    rows = "\n".join(f"| {entry['name']} | {entry['shape']} | {entry['bytes']} | {entry['initial']} |" for entry in spec["state"])
    support = "\n".join(f"- {name.replace('_', ' ')}: {text}" for name, text in spec["support"].items())
    cost = spec["cost"]
    return f"""## 7. State between calls

Per layer and sequence after t tokens, bytes at {cost["element_bytes"]} bytes an element; "first exact" is the bound of 5.3 for the next query:

| what | shape | bytes | at the start |
|---|---|---|---|
{rows}

In the limit of a long context {cost["kv_bytes_per_token"]:g} bytes a token over all layers, {100 * cost["kv_kept"]:.4g} % of full attention's.

Prompts begin with token(s) {spec["phase"]["tokens_before_the_user"]}, so the user's first token is at position {len(spec["phase"]["tokens_before_the_user"])}.

{support}"""


def _proof(spec: dict[str, Any]) -> str:
    wide, narrow = spec["tolerances"]["float64"], spec["tolerances"]["float32"]
    allowed = f"fp64 {wide['L0']:g} at L0, {wide['L2']:g} at L2; fp32 {narrow['L0']:g} and {narrow['L2']:g}"
    return f"""## 8. Proof of a port

`golden/cases.json` lists cases; `golden/inputs.safetensors` holds their inputs. Write `<level>.safetensors` for each of its levels into a folder, tensors
named `<level>.<case>.<output>`, in fp64 or fp32, and run `mitigate verify BUNDLE --against FOLDER`.

- `summaries` (L0): of one layer from the hidden states `input`: `key_gate_logits`, `key_gates` [N, W, G, E], `pooled_key`, `key`, `value` [N, G, D], …
- `visibility` (L1): uint8 [T, N + T], summaries first, for T = `length` tokens and the layer's windows.
- `logits` (L2, anti): the tokens `input[skip:]` in calls of `chunks` tokens from an empty state; logits of the `last` positions. `weights` names the
  compressor's file: under `anti` it holds shuffled gates, and a port must follow them.

Allowed differences, relative to max(1, largest golden magnitude of the tensor): {allowed}. L1 must be equal.
`must_differ` lists logits of known faults, from which the one-shot logits must keep away."""
