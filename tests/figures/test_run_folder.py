import pytest
import yaml

from embeddings.common import InputError
from embeddings.figures.run_folder import read_run_config, read_run_record, run_parts


def write_run(run, ckpt_path=None, dirpath=None, checkpoint=None):
    run.mkdir(parents=True)
    kept = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": dirpath}}
    config = {"ckpt_path": ckpt_path, "trainer": {"callbacks": [kept]}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    if checkpoint:
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / checkpoint).touch()
    return run


def names(parts):
    return [part.name for part in parts]


def test_the_config_and_the_record_are_read(tmp_path):
    write_run(tmp_path / "run", "a.ckpt")
    (tmp_path / "run" / "run.json").write_text('{"commit": "abc"}')
    assert read_run_config(tmp_path / "run")["ckpt_path"] == "a.ckpt"
    assert read_run_record(tmp_path / "run") == {"commit": "abc"}


@pytest.mark.parametrize(
    ("name", "read", "damages"),
    [
        ("config.yaml", read_run_config, [b"", b"- a", b"a: [", b"\xff\xfe\x00", b"[" * 5000]),
        ("run.json", read_run_record, [b"", b"[]", b"{", b"\xff", b"[" * 100_000]),
    ],
)
def test_a_missing_or_damaged_file_is_one_line(name, read, damages, tmp_path):
    with pytest.raises(InputError, match=f"{name}: no such file; give the folder of a run"):
        read(tmp_path)
    for damage in damages:
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(InputError, match=f"{name}: is damaged; "):
            read(tmp_path)


def test_a_run_that_went_on_from_nothing_or_elsewhere_is_one_part(tmp_path):
    alone = write_run(tmp_path / "a" / "version_0")
    assert run_parts(alone) == [alone]
    elsewhere = write_run(tmp_path / "a" / "version_1", "b/version_0/checkpoints/last.ckpt")
    assert run_parts(elsewhere) == [elsewhere]
    bare = tmp_path / "bare"
    bare.mkdir()
    assert run_parts(bare) == [bare]


def test_a_run_is_followed_from_part_to_part(tmp_path, monkeypatch):
    runs = tmp_path / "moved" / "name"
    for number in range(12):
        write_run(
            runs / f"version_{number}", f"old/name/version_{number - 2}/checkpoints/a.ckpt" if number > 1 else None
        )
    assert names(run_parts(runs / "version_10")) == [f"version_{number}" for number in (0, 2, 4, 6, 8, 10)]
    monkeypatch.chdir(runs / "version_3")
    from pathlib import Path

    assert names(part.resolve() for part in run_parts(Path())) == ["version_1", "version_3"]


def test_parts_that_kept_on_in_the_first_ones_folder_are_all_found(tmp_path):
    """`--ckpt_path auto` has each process write beside the checkpoint that it went on from."""
    runs, place = tmp_path / "runs" / "name", "runs/name/version_0/checkpoints"
    write_run(runs / "version_0", checkpoint="last.ckpt")
    write_run(runs / "version_1", f"{place}/last.ckpt")
    assert names(run_parts(write_run(runs / "version_2", f"{place}/last.ckpt"))) == [
        "version_0",
        "version_1",
        "version_2",
    ]


def test_a_branch_with_checkpoints_of_its_own_is_no_part(tmp_path):
    runs, place = tmp_path / "runs" / "name", "runs/name/version_0/checkpoints"
    write_run(runs / "version_0", checkpoint="last.ckpt")
    write_run(runs / "version_1", f"{place}/last.ckpt", checkpoint="last.ckpt")
    assert names(run_parts(write_run(runs / "version_2", f"{place}/last.ckpt"))) == ["version_0", "version_2"]


def test_a_checkpoint_beside_the_parts_is_that_of_the_one_before(tmp_path):
    """As the runs of a sweep write them."""
    runs, place = tmp_path / "sweep" / "point", "sweep/point/checkpoints"
    write_run(runs / "version_0", dirpath=place)
    write_run(runs / "version_1", f"{place}/last.ckpt", dirpath=place)
    assert names(run_parts(write_run(runs / "version_2", f"{place}/last.ckpt", dirpath=place))) == [
        "version_0",
        "version_1",
        "version_2",
    ]
