"""Files are complete or absent, and their checksum detects any flipped bit."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from saccade.models.checkpoint import load_checkpoint, read_state, save_checkpoint  # noqa: E402
from saccade.models.files import check_seal, write_atomic, write_together  # noqa: E402
from saccade.models.weights import load_tensors, read_header, save_weights  # noqa: E402

FLIPS = 250


@pytest.fixture
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(9, 7)


@pytest.fixture
def checkpoint(tmp_path: Path, net: torch.nn.Module) -> Path:
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(3, 9)).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, net, optimizer, {"step": 1, "text": "é"})
    return path


def places(data: bytes, draw: random.Random) -> list[int]:
    """Bits of each region: the length, every bit of the seal, the rest of the header, and the tensors."""
    header = 8 + int.from_bytes(data[:8], "little")
    regions = {"length": (0, 8), "seal": (8, 120), "header": (120, header), "tensors": (header, len(data))}
    return [8 * draw.randrange(*region) + draw.randrange(8) for region in regions.values() for _ in range(FLIPS)]


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_seen(checkpoint: Path, seed: int) -> None:
    whole = checkpoint.read_bytes()
    assert read_state(checkpoint) == {"step": 1, "text": "é"}
    for bit in places(whole, random.Random(seed)):
        checkpoint.write_bytes(flipped(whole, bit))
        with pytest.raises(ValueError, match=r"checkpoint\.safetensors is (damaged|not a checkpoint).*--overwrite"):
            read_state(checkpoint)
    for cut in (0, 7, 8, 100, len(whole) - 1):
        checkpoint.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="is damaged"):
            read_state(checkpoint)


def test_a_flipped_bit_anywhere_in_weights_is_seen(net: torch.nn.Module, tmp_path: Path, seed: int) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(path, net)
    whole = path.read_bytes()
    assert set(read_header(tmp_path)) == {"weight", "bias"}
    for bit in places(whole, random.Random(seed)):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(ValueError, match=r"model\.safetensors is (damaged|cut)"):
            read_header(tmp_path)


def test_sealed_files_are_safetensors_that_others_read(net: torch.nn.Module, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    save_weights(path, net)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    loaded = {name: x.clone() for name, x in load_file(path).items()}
    assert torch.equal(loaded["weight"], net.weight)
    # equal weights, equal bytes; and what another program wrote needs no seal
    first = path.read_bytes()
    save_weights(path, net)
    assert path.read_bytes() == first
    save_file(loaded, path, {"format": "pt"})
    check_seal(path, "")
    assert torch.equal(load_tensors(tmp_path)["weight"], net.weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    broken = torch.zeros(300, dtype=dtype)
    broken[123] = value
    save_weights(tmp_path / "model.safetensors", {"good": torch.ones(3), "layer.bad": broken})
    with pytest.raises(ValueError, match=r"layer\.bad in .*model\.safetensors holds NaN or an infinity"):
        load_tensors(tmp_path)


def test_a_link_planted_at_a_temporary_name_is_not_written_through(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_bytes(b"precious")
    (tmp_path / ".file.tmp").symlink_to(victim)
    write_atomic(path, b"new")
    assert (victim.read_bytes(), path.read_bytes()) == (b"precious", b"new")
    assert not path.is_symlink()
    assert {one.name for one in tmp_path.iterdir()} == {"victim", "file"}


@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind_and_is_told_by_the_file(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"old")
    monkeypatch.setattr(os, operation, full)
    with pytest.raises(OSError, match="first" if operation == "fsync" else "No space"):
        write_together([(first, b"new"), (second, b"new")])
    assert [one.name for one in tmp_path.iterdir()] == ["first"]
    assert first.read_bytes() == b"old"


def test_a_checkpoint_without_its_parts_says_what_it_lacks(
    checkpoint: Path, net: torch.nn.Module, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save

    from saccade.models.files import seal

    optimizer = torch.optim.AdamW(net.parameters())
    # the file, which is mapped into memory, is written over
    tensors = {name: x.clone() for name, x in load_file(checkpoint).items()}
    for lost, words in (
        ("generator.torch", "lacks 'generator.torch'"), ("optimizer.bias.exp_avg", "lacks 'optimizer.bias.exp_avg'"),
        ("model.bias", "holds another model"),
    ):  # fmt: skip
        rest = {name: x for name, x in tensors.items() if name != lost}
        checkpoint.write_bytes(seal(save(rest), {"state": "{}"}))
        with pytest.raises(ValueError, match=words):
            load_checkpoint(checkpoint, net, optimizer)
    for state in ("5", "[", "[" * 100000):
        checkpoint.write_bytes(seal(save(tensors), {"state": state}))
        with pytest.raises(ValueError, match="not a checkpoint"):
            read_state(checkpoint)
