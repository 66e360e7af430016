"""`saccade devices`: the backends of this machine, and the devices the cost model knows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from . import show


def backends() -> list[dict[str, Any]]:
    """One entry a backend: its name, whether it loads here, why not, and what it says of itself."""
    from saccade import backends as known
    from saccade.errors import Unsupported

    found: list[dict[str, Any]] = []
    for name in known.ORDER:
        entry: dict[str, Any] = {"name": name, "ready": False, "reasons": [], "detail": ""}
        try:
            module: Any = known.load(name)
        except Unsupported as error:
            entry["reasons"] = list(error.reasons)
        except ImportError as error:
            entry["reasons"] = [str(error)]
        else:
            entry["ready"] = True
            words = [f"{word} {getattr(module, call)()}" for word, call in _WORDS if hasattr(module, call)]
            entry["detail"] = ", ".join(words)
        found.append(entry)
    return found


_WORDS = (("isa", "isa"), ("threads", "get_num_threads"))


def devices(json: show.Json = False) -> None:
    """List the backends of this machine and the devices the cost model knows."""
    from saccade import cost

    here = backends()
    if json:
        known = {name: {**asdict(d), "ridge": {t: d.ridge(t) for t in d.flops}} for name, d in cost.DEVICES.items()}
        show.document({"backends": here, "devices": known})
        return
    rows = [(b["name"], "ready" if b["ready"] else "no", b["detail"] or "; ".join(b["reasons"])) for b in here]
    show.table(("backend", "here", "detail"), rows)
    head = ("device", "bf16 TFLOP/s", "fp32 TFLOP/s", "TB/s", "memory", "ridge bf16", "source")
    show.table(head, [_known(d) for d in cost.DEVICES.values()], title="cost model")


def _known(d: Any) -> tuple[str, ...]:
    from saccade import cost

    rates = (f"{d.peak(t) / 1e12:.4g}" for t in ("bfloat16", "float32"))
    return (d.name, *rates, f"{d.bandwidth / 1e12:.4g}", cost.size(d.memory), f"{d.ridge():.1f}", d.source)
