"""The search space: which variants a search may try, and when two settings are the same variant.

`SearchConfig.space` maps a parameter to its choices. A parameter is a field of `VariantConfig` (all but `compress`: full attention is an anchor)
or `overlap`, the window in strides as a string fraction ("1", "3/2", "2").

- `overlap` sets window = ceil(stride * overlap): a window that is no integer is rounded up, so 1 <= S <= W holds by construction.
- `stride` without `window` and `overlap` means windows that do not overlap (W = S).
- `window` and `overlap` exclude each other. `window` and `stride` may both be searched only where every stride fits every window.
- A parameter that cannot matter is not suggested: `coverage` with a uniform gate, `coverage_weight` and `coverage_scope` with no coverage,
  `coverage_threshold` without a hinge, `coarse_factor` without coarse layers. `canonical` also folds settings that mean the same model; equal hashes of
  canonical variants are duplicates. It does not know the number of layers: strategies of `coarse` and `stagger` that agree on few layers stay apart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import ceil, prod
from typing import Any, Protocol

from mitigate.config import ConfigError, TrialConfig, VariantConfig, content_hash, to_dict
from mitigate.config_files import did_you_mean, from_dict
from mitigate.config_search import SearchConfig

Choice = str | int | float
Check = Callable[[VariantConfig], None]
RULES = 2  # version of the rules above; part of the fingerprint
DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(VariantConfig)}
KEYS = [key for name in DEFAULTS if name != "compress" for key in ((name, "overlap") if name == "stride" else (name,))]
_TRIES = 256  # combinations tried before a choice counts as unusable


class Suggests(Protocol):
    """The part of `optuna.Trial` that a space needs."""

    def suggest_categorical(self, name: str, choices: list[Choice]) -> Any: ...


def canonical(variant: VariantConfig) -> VariantConfig:
    """The same model with every field that cannot matter at its default.

    Coverage acts only through learned gates and a weight above 0, its threshold only through the hinge; a uniform gate leaves no gates to tie; with
    S = W the first token of the last stride is the window's first, with S = 1 it is the window's last.
    """
    if not variant.compress:
        return variant
    changes: dict[str, Any] = {}
    if variant.gate == "uniform" and variant.tie == "gates":
        changes["tie"] = "none"
    if variant.gate == "uniform" or variant.coverage == "none" or variant.coverage_weight == 0:
        changes |= {"coverage": "none", "coverage_weight": 0.0, "coverage_scope": "layer"}
    if changes.get("coverage", variant.coverage) != "hinge":
        changes["coverage_threshold"] = DEFAULTS["coverage_threshold"]
    if variant.coarse == "none" or variant.coarse_factor == 1:
        changes |= {"coarse": "none", "coarse_factor": 1}
    same = "window_start" if variant.stride == variant.window else "window_end" if variant.stride == variant.coarse_factor == 1 else ""
    if variant.rope_position == same:
        changes["rope_position"] = "last_stride"
    return dataclasses.replace(variant, **changes)


def variant_key(variant: VariantConfig) -> str:
    """Content hash of the canonical variant: equal keys are the same model."""
    return content_hash(canonical(variant))


class SearchSpace:
    """Choices per parameter in a fixed order. `check` may refuse a variant with a ConfigError; such combinations are left out."""

    def __init__(self, choices: dict[str, tuple[Choice, ...]], *, template: TrialConfig | None = None, check: Check | None = None) -> None:
        self.choices = {key: choices[key] for key in KEYS if key in choices}
        self.template = template or TrialConfig()
        self.check = check

    @classmethod
    def from_config(cls, config: SearchConfig, *, check: Check | None = None) -> SearchSpace:
        """The space of a search, every choice tried out.

        Raises:
            ConfigError: unknown parameter, wrong type, value out of bounds, or a choice that no combination can use.
        """
        for key in config.space:
            if key not in KEYS:
                raise ConfigError(f"SearchConfig.space.{key} is not a known parameter{did_you_mean(key, KEYS)}")
        space = cls(config.space, template=config.trial, check=check)
        space.validate()
        return space

    def validate(self) -> None:
        """Build configs until every choice was used once; ConfigError names the parameter and the reason."""
        self._validate_windows()
        self._validate_coarse()
        for key, values in self.choices.items():
            for value in values:
                self._validate_choice(key, value)

    def fingerprint(self) -> str:
        """sha256 in hex of the parameters, their choices in order, and the version of the rules."""
        plain = {"rules": RULES, "choices": [[key, list(values)] for key, values in self.choices.items()]}
        return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()

    def suggest(self, trial: Suggests) -> dict[str, Choice]:
        """Choose every active parameter through `trial`, in the fixed order."""
        return self._choose(lambda key: trial.suggest_categorical(key, list(self.choices[key])))

    def neighbour(self, params: dict[str, Choice], rng: random.Random, *, changes: int) -> dict[str, Choice]:
        """`params` with at most `changes` parameters chosen anew; one that becomes active thereby is chosen at random."""
        changed = set(rng.sample(sorted(params), min(changes, len(params))))
        return self._choose(lambda key: rng.choice(self.choices[key]) if key in changed or key not in params else params[key])

    def random(self, rng: random.Random) -> dict[str, Choice]:
        """Uniform choices of the active parameters."""
        return self._choose(lambda key: rng.choice(self.choices[key]))

    def to_variant(self, params: dict[str, Choice]) -> VariantConfig:
        """The canonical variant of a set of choices; ConfigError where they do not go together."""
        fields = {key: value for key, value in params.items() if key != "overlap"}
        stride = params.get("stride", DEFAULTS["stride"])
        if "window" not in params and isinstance(stride, int):
            # as mitigate.variants.overlap, whose import would bring torch to a search that has nothing left to run
            fields["window"] = max(1, ceil(stride * Fraction(str(params.get("overlap", "1")))))
        return canonical(from_dict(VariantConfig, fields))

    def to_params(self, variant: VariantConfig) -> dict[str, Choice] | None:
        """Choices that give `variant`, None where the space does not hold it."""
        wanted = canonical(variant)

        def pick(key: str) -> Choice:
            fits = (
                c for c in self.choices[key] if (ceil(wanted.stride * Fraction(str(c))) == wanted.window if key == "overlap" else c == getattr(wanted, key))
            )
            return next(fits)

        try:
            params = self._choose(pick)
            return params if self.to_variant(params) == wanted else None
        except (StopIteration, ConfigError):
            return None

    def trial_config(self, variant: VariantConfig) -> TrialConfig:
        """The template with this variant; ConfigError where they do not go together."""
        try:
            return dataclasses.replace(self.template, variant=variant)
        except ValueError:  # pydantic's; build again for the one-line message
            return from_dict(TrialConfig, to_dict(self.template) | {"variant": to_dict(variant)})

    def usable(self, params: dict[str, Choice]) -> VariantConfig | None:
        """The variant of a set of choices, None where they do not go together."""
        try:
            return self._require_usable(params)
        except ConfigError:
            return None

    def bound(self) -> int:
        """At most this many variants: the product of the numbers of choices."""
        return prod(len(values) for values in self.choices.values())

    def variants(self) -> Iterator[tuple[dict[str, Choice], VariantConfig]]:
        """Every usable variant once, with choices that give it, in a fixed order."""
        seen: set[str] = set()
        for values in itertools.product(*self.choices.values()):
            named = dict(zip(self.choices, values, strict=True))
            params = self._choose(named.__getitem__)
            variant = self.usable(params)
            if variant is not None and (key := content_hash(variant)) not in seen:
                seen.add(key)
                yield params, variant

    def _choose(self, choose: Callable[[str], Choice]) -> dict[str, Choice]:
        params: dict[str, Choice] = {}
        for key in self.choices:
            if _active(key, params):
                params[key] = choose(key)
        return params

    def _require_usable(self, params: dict[str, Choice]) -> VariantConfig:
        variant = self.to_variant(params)
        self.trial_config(variant)
        if self.check is not None:
            self.check(variant)
        return variant

    def _validate_windows(self) -> None:
        windows, strides = self.choices.get("window"), self.choices.get("stride")
        if windows and "overlap" in self.choices:
            raise ConfigError("SearchConfig.space.window must be left out while overlap is searched (window = stride * overlap)")
        for value in self.choices.get("overlap", ()):
            _require_fraction(value)
        widest = max((v for v in strides or () if isinstance(v, int)), default=0)
        narrowest = min((v for v in windows or () if isinstance(v, int)), default=widest)
        if widest > narrowest:
            raise ConfigError(f"SearchConfig.space.stride must be at most every window ({narrowest}), got {widest}; search overlap instead of window")

    def _validate_coarse(self) -> None:
        """Either of the two alone changes nothing, and would be blamed for it."""
        names, factors = self.choices.get("coarse", ()), self.choices.get("coarse_factor", ())
        if any(name != "none" for name in names) and not any(isinstance(factor, int) and factor > 1 for factor in factors):
            raise ConfigError(f"SearchConfig.space.coarse needs a coarse_factor above 1 among the choices, got {list(factors) or 'none'}")
        if factors and not any(name != "none" for name in names):
            raise ConfigError(f'SearchConfig.space.coarse_factor needs a coarse other than "none" among the choices, got {list(names) or "none"}')

    def _validate_choice(self, key: str, value: Choice) -> None:
        reasons: list[str] = []
        for params in self._combinations_with(key, value):
            try:
                variant = self._require_usable(params)
            except ConfigError as error:
                reasons.append(str(error))
                continue
            if key == "overlap" or (key in params and getattr(variant, key) == value):
                return
        about = [reason for reason in reasons if f".{key}" in reason] or reasons
        raise ConfigError(f"SearchConfig.space.{key}: {about[0] if about else f'{value!r} changes nothing in any combination of the space'}")

    def _combinations_with(self, key: str, value: Choice) -> Iterator[dict[str, Choice]]:
        """Choices with `key` at `value`: one after the other in step, then at random from a fixed seed."""
        rng = random.Random(0)
        longest = max(len(values) for values in self.choices.values())
        for i in range(longest + _TRIES):
            named = {k: v[i % len(v)] if i < longest else rng.choice(v) for k, v in self.choices.items()} | {key: value}
            yield self._choose(named.__getitem__)


def _active(key: str, params: dict[str, Choice]) -> bool:
    gate, coverage = params.get("gate", DEFAULTS["gate"]), params.get("coverage", DEFAULTS["coverage"])
    alike = params.get("coarse", DEFAULTS["coarse"]) == "none"
    inactive = {
        "coarse_factor": alike,
        "coverage": gate == "uniform",
        "coverage_weight": coverage == "none",
        "coverage_scope": coverage == "none",
        "coverage_threshold": coverage != "hinge",
    }
    return not inactive.get(key, False)


def _require_fraction(value: Choice) -> None:
    try:
        if isinstance(value, str) and Fraction(value) >= 1:
            return
    except (ValueError, ZeroDivisionError):
        pass
    raise ConfigError(f'SearchConfig.space.overlap must be a string fraction of at least 1, such as "3/2", got {value!r}')
