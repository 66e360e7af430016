"""`saccade devices`: this machine's backends, what Triton's kernels have run on, and the devices `explain` knows."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from . import show


def backends(names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """One entry per backend, all by default: its name, whether it works here, why not, and its description."""
    from saccade import backends as known
    from saccade.errors import Unsupported

    entries: list[dict[str, Any]] = []
    for name in names or known.ORDER:
        entry: dict[str, Any] = {"name": name, "ready": False, "reasons": [], "detail": ""}
        if name == "triton" and no_nvidia():
            entries.append({**entry, "reasons": ["no NVIDIA driver is on this machine"]})
            continue
        try:
            module: known.Backend = known.load(name)
            entry["reasons"] = module.missing()
            about = {} if entry["reasons"] else module.describe()
        except Unsupported as error:
            entry["reasons"] = list(error.reasons)
        except ImportError as error:
            entry["reasons"] = [str(error)]
        else:
            entry["ready"] = not entry["reasons"]
            entry["detail"] = one_line(about)
            if "name" in about:
                entry["adapter"] = about
        entries.append(entry)
    return entries


def checked_backend(name: str | None, option: str = "--backend") -> None:
    """End the command if there is no such backend, or if it is not ready on this machine."""
    from saccade.backends import ORDER

    if not name:
        return
    if name not in ORDER:
        show.fail(f"{option} is {name!r}; expected one of {', '.join(ORDER)}")
    (entry,) = backends([name])
    if not entry["ready"]:
        show.fail(f"{option} is {name!r}, which is not ready here: {'; '.join(entry['reasons'])}")


def no_nvidia() -> bool:
    """Whether Triton cannot run: no NVIDIA or AMD driver, and its interpreter is off. Does not import torch."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return False
    for library in ("libcuda.so.1", "nvcuda.dll", "libamdhip64.so"):
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return False
    return True


def one_line(adapter: dict[str, Any]) -> str:
    """The description of a backend on one line: an adapter, or a few words."""
    if "name" not in adapter:
        return ", ".join(f"{word} {value}" for word, value in adapter.items())
    kind = " (software)" if adapter["software"] else ""
    storage, memory, threads, binding = adapter["limits"].values()
    limits = (
        f"{storage} storage buffers, {memory >> 10} KiB per workgroup of {threads}, {binding >> 20} MiB per binding"
    )
    features = ", ".join(adapter["features"]) or "no features"
    return f"{adapter['name']}{kind}, {adapter['driver']}, {adapter['api']}; {features}; {limits}"


def devices(json: show.Json = False) -> None:
    """List the backends of this machine, and the devices that `saccade explain` knows."""
    from saccade import cost
    from saccade.backends import tested

    here, kernels = backends(), tested.summary()
    if json:
        known = {name: {**asdict(d), "ridge": {t: d.ridge(t) for t in d.flops}} for name, d in cost.DEVICES.items()}
        show.document({"backends": here, "triton kernels": kernels, "devices": known})
        return
    rows = [(b["name"], "ready" if b["ready"] else "no", b["detail"] or "; ".join(b["reasons"])) for b in here]
    show.table(("backend", "here", "detail"), rows)
    show.pairs("kernels of triton", kernels)
    head = ("device", "bf16 TFLOP/s", "fp32 TFLOP/s", "TB/s", "memory", "ridge bf16", "source")
    show.table(head, [_known(d) for d in cost.DEVICES.values()], title="devices of the cost model")


def _known(d: Any) -> tuple[str, ...]:
    from saccade import cost

    rates = (f"{d.peak(t) / 1e12:.4g}" for t in ("bfloat16", "float32"))
    return (d.name, *rates, f"{d.bandwidth / 1e12:.4g}", cost.size(d.memory), f"{d.ridge():.1f}", d.source)
