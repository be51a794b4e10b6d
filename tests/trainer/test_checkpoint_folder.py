"""Checkpoints on a disk that fills up, in a job that is killed, among files of somebody else."""

import json
import re
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.checkpoint import load, save
from fp8scope_trainer.checkpoint_folder import MANIFEST, PARTIAL, newest
from fp8scope_trainer.state_conversion import convert_states

JOB = str(Path(__file__).with_name("saving_job.py"))


def filled(step: int, rows: int = 8) -> nn.Module:
    model = nn.Linear(16, rows, bias=False)
    torch.nn.init.constant_(model.weight, step)
    return model


def loaded(folder: Path, rows: int = 8) -> tuple[int, list[float]]:
    """The step, and the different values of the weights."""
    model = filled(0, rows)
    return load(folder, model).step, model.state_dict()["weight"].unique().tolist()


def flip(file: Path) -> None:
    """One bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def test_a_job_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """SIGKILL while bytes are being written: what `latest` names is whole, and the next save cleans up."""
    partial = tmp_path / PARTIAL / "__0_0.distcp"
    for _ in range(5):
        job = subprocess.Popen([sys.executable, JOB, str(tmp_path), "1000", "64"])
        try:
            while not ((tmp_path / "latest").exists() and partial.exists()):
                assert job.poll() is None
                time.sleep(0.001)
        finally:
            job.kill()
            job.wait()
        if partial.exists():
            break
    assert partial.exists(), "five jobs were all killed between two saves"
    model = nn.Linear(512, 512 * 64, bias=False)
    step = load(tmp_path, model).step
    assert model.state_dict()["weight"].unique().tolist() == [step]
    save(tmp_path, filled(step + 1), step=step + 1)
    assert loaded(tmp_path) == (step + 1, [step + 1])
    assert not (tmp_path / PARTIAL).exists()


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    """On a file system of 3.5 MiB the fourth checkpoint of 1 MiB fails by name; the third is loaded."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this system lets nobody mount a small file system")
    command = 'mount -t tmpfs -o size=3584k none "$1" && exec "$0" "$2" "$1" 9 1'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command, sys.executable, str(tmp_path), JOB],
                          capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["error"].startswith("NotSaved: the checkpoint of step 4 could not be written in ")
    assert "No space left on device (rank 0); those before it are untouched" in found["error"]
    assert (found["step"], found["values"]) == (3, [3.0])


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    """One folder a step, and it is the second; other steps stay."""
    for value, step in ((1, 1), (2, 2), (7, 2)):
        save(tmp_path, filled(value), step=step)
    assert loaded(tmp_path) == (2, [7])
    assert len(list(tmp_path.glob("step-*"))) == 2
    assert loaded(tmp_path / "step-00000001") == (1, [1])


def test_going_back_makes_the_older_step_the_newest(tmp_path: Path) -> None:
    """`latest` follows what was saved last, not the largest number; without it the largest counts."""
    for step in (1, 9, 4):
        save(tmp_path, filled(step), step=step)
    assert loaded(tmp_path) == (4, [4])
    (tmp_path / "latest").unlink()
    assert loaded(tmp_path) == (9, [9])


def test_what_is_not_ours_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    """Files beside the checkpoints stay; what has one of our names and is not ours is refused."""
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path, filled(1), step=1)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    theirs = tmp_path / "step-00000002"
    theirs.mkdir()
    (theirs / "weights.bin").write_text("precious")
    with pytest.raises(Invalid, match=r"holds step-00000002 without fp8scope\.json"):
        save(tmp_path, filled(2), step=2)
    assert (theirs / "weights.bin").read_text() == "precious"
    assert loaded(tmp_path) == (1, [1])
    other = tmp_path / "other"
    other.mkdir()
    (other / "latest").write_text("global_step7")
    with pytest.raises(Invalid, match="holds a latest that is not ours"):
        save(other, filled(1), step=1)
    with pytest.raises(Invalid, match="is a file; name a folder"):
        save(tmp_path / "notes.txt", filled(1), step=1)


def test_nothing_to_load_says_what_is_there(tmp_path: Path) -> None:
    """Each wrong folder has its own words; `newest` of an empty one is None."""
    assert newest(tmp_path) is None
    with pytest.raises(Invalid, match="holds no checkpoint"):
        load(tmp_path, filled(0))
    with pytest.raises(Invalid, match="does not exist"):
        load(tmp_path / "nowhere", filled(0))
    torch.save({}, tmp_path / "model.pt")
    with pytest.raises(Invalid, match="fp8scope convert-checkpoint FROM TO"):
        load(tmp_path / "model.pt", filled(0))
    (tmp_path / PARTIAL).mkdir()
    with pytest.raises(Invalid, match="holds only a checkpoint that was never finished"):
        load(tmp_path, filled(0))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    """Short, missing or garbled files, and a manifest that is none or of a newer version."""
    path = save(tmp_path / "a", filled(1, rows=512), step=1)
    data = path / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    with pytest.raises(Invalid, match=r"its file __0_0\.distcp has .* bytes and should have"):
        load(path, filled(0, rows=512))
    data.unlink()
    with pytest.raises(Invalid, match=r"__0_0\.distcp is missing"):
        load(path, filled(0, rows=512))
    data.write_bytes(whole.replace(b"PK", b"XX"))
    with pytest.raises(Invalid, match="is damaged, and what was loaded of it must not be used"):
        load(path, filled(0, rows=512), verify=False)
    data.write_bytes(whole)
    assert loaded(path, rows=512) == (1, [1])
    records = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(b"X" * len(records))
    with pytest.raises(Invalid, match=r"has a \.metadata that cannot be read: .*copy it again"):
        load(path, filled(0, rows=512), verify=False)
    (path / ".metadata").write_bytes(records)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"layout": 2}))
    with pytest.raises(Invalid, match="has layout 2, of a newer fp8scope"):
        load(path, filled(0, rows=512))
    (path / MANIFEST).write_text("{")
    with pytest.raises(Invalid, match=r"has no fp8scope\.json that can be read"):
        load(path, filled(0, rows=512))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_flipped_bit_is_found_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    """In a weight or in DCP's own records: the file, both checksums and what to do are named. Conversion
    finds it, too; the bit in the weight is loaded by who does not look."""
    model = filled(1, rows=512)
    path = save(tmp_path / "a", model, torch.optim.AdamW(model.parameters()), step=1)
    flip(path / name)
    sums = "has CRC-32 [0-9a-f]{8} and should have [0-9a-f]{8}"
    rule = f"its file {re.escape(name)} {sums}: .*copy it again"
    fresh = filled(0, rows=512)
    with pytest.raises(Invalid, match=rule):
        load(path, fresh)
    assert not fresh.state_dict()["weight"].any()
    with pytest.raises(Invalid, match=rule):
        convert_states(path, tmp_path / "b")
    if name != ".metadata":
        load(path, fresh, verify=False)
        assert len(fresh.state_dict()["weight"].unique()) == 2


def test_what_is_written_is_what_is_summed(tmp_path: Path) -> None:
    """Every file of DCP has the checksum of its bytes in the manifest, which has none of its own."""
    path = save(tmp_path, filled(1, rows=512), step=1)
    files = [one for one in path.iterdir() if one.name != MANIFEST]
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["crc32"] == {one.name: f"{zlib.crc32(one.read_bytes()):08x}" for one in files}
    assert manifest["crc32"].keys() == manifest["files"].keys()


def test_a_checkpoint_without_checksums_is_loaded_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As an older version wrote it; one with checksums is not spoken of."""
    path = save(tmp_path, filled(1), step=1)
    assert loaded(tmp_path) == (1, [1])
    assert "checksums" not in caplog.text
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["crc32"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert loaded(tmp_path) == (1, [1])
    assert "the checkpoint of step 1 has no checksums, an older fp8scope wrote it" in caplog.text


def test_extra_is_what_json_can_hold(tmp_path: Path) -> None:
    """It comes back as it was; what JSON has no way to write is refused before anything is written."""
    save(tmp_path, filled(1), step=1, extra={"best": 1.5, "names": ["a"]})
    assert load(tmp_path, filled(0)).extra == {"best": 1.5, "names": ["a"]}
    for value in (float("nan"), torch.ones(1)):
        with pytest.raises(Invalid, match="must be what JSON can hold"):
            save(tmp_path, filled(2), step=2, extra={"best": value})
    assert loaded(tmp_path) == (1, [1])
