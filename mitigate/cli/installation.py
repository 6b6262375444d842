"""Commands about the installation itself: variants lists what it holds, doctor checks how it runs on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from mitigate.cli.shared import add_command


def add_variants(commands: Any) -> None:
    add_command(commands, "variants", _variants, "list strategies and presets")


def _variants(arguments: argparse.Namespace) -> int:
    from mitigate import registry

    strategies, presets = registry.strategies(), registry.presets()
    width = max(len(name) for name in [s.name for s in strategies] + [p.name for p in presets]) + 2
    axis = ""
    print("Strategies, by axis of a variant:")
    for strategy in strategies:
        if strategy.axis != axis:
            axis = strategy.axis
            print(f"  {axis}")
        print(f"    {strategy.name:{width}}{strategy.summary} [{strategy.source}]")
    print("\nPresets (--variant NAME, anchors):")
    for preset in presets:
        print(f"    {preset.name:{width}}{preset.summary} [{preset.source}]")
    return 0


def add_doctor(commands: Any) -> None:
    add_command(commands, "doctor", _doctor, "devices, versions and backends, and a check of each kernel against the reference")


def _doctor(arguments: argparse.Namespace) -> int:
    from mitigate import doctor

    return doctor.run()
