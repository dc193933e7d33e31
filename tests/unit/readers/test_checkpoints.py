"""Checkpoint folders: complete ones pass, every kind of missing or broken piece is found."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from lanterne.backend.readers import diagnose_paths
from lanterne.backend.readers.checkpoints import verify


def tensors(path: Path, n: int = 4) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [n], "data_offsets": [0, 4 * n]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4 * n)


def trainer(folder: Path) -> Path:
    folder.mkdir(parents=True)
    tensors(folder / "model-00001-of-00002.safetensors")
    tensors(folder / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    torch.save({"step": 3, "m": torch.zeros(64)}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"log_history": []}')
    return folder


def test_a_whole_checkpoint_passes(tmp_path: Path) -> None:
    assert verify(trainer(tmp_path / "checkpoint-10")) == []
    assert diagnose_paths([tmp_path]).healthy


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = trainer(tmp_path / "checkpoint-10")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert {p.kind for p in verify(folder)} == {"incomplete"}
    assert diagnose_paths([tmp_path]).incidents[0].causes[0].category == "checkpoint_incomplete"


@pytest.mark.parametrize("name", ["optimizer.pt", "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_truncated_file(tmp_path: Path, name: str, share: float) -> None:
    folder = trainer(tmp_path / "checkpoint-10")
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * share)])
    found = verify(folder)
    assert [p.kind for p in found] == ["corrupt"]
    assert name in found[0].path
    assert diagnose_paths([tmp_path]).incidents[0].causes[0].category == "checkpoint_corrupt"


def test_a_flipped_byte_in_an_archive(tmp_path: Path) -> None:
    folder = trainer(tmp_path / "checkpoint-10")
    path = folder / "optimizer.pt"
    torch.save({"m": torch.arange(4096.0)}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    assert [p.kind for p in verify(folder)] == ["corrupt"]


def test_the_newest_lacks_what_older_ones_have(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        trainer(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-30" / "optimizer.pt").unlink()
    found = verify(tmp_path)
    assert [Path(p.path).name for p in found] == ["optimizer.pt"]
    assert diagnose_paths([tmp_path]).incidents[0].causes[0].category == "checkpoint_incomplete"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.zeros(8)}, checkpoint_id=str(tmp_path / "step_5"))
    assert verify(tmp_path / "step_5") == []
    next((tmp_path / "step_5").glob("*.distcp")).unlink()
    assert [p.kind for p in verify(tmp_path / "step_5")] == ["incomplete"]


def test_pieces_without_metadata(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"x" * 64)
    assert [p.kind for p in verify(tmp_path)] == ["incomplete"]


def test_deepspeed_shards(tmp_path: Path) -> None:
    folder = tmp_path / "global_step5"
    folder.mkdir()
    for rank in (0, 1, 3):
        torch.save({}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    torch.save({}, folder / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("global_step6")
    says = " ".join(p.says for p in verify(tmp_path))
    assert "data rank 2" in says
    assert "global_step6" in says


def test_a_world_with_a_hole(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        torch.save({}, tmp_path / f"model_world_size_4_rank_{rank}.pt")
    assert "rank 2 of a world of 4" in verify(tmp_path)[0].says


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        verify(tmp_path / "nowhere")
