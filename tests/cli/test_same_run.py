from copy import deepcopy
from typing import Any

import pytest

from embeddings.cli.same_run import first_difference

RUN: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"devices": 1, "num_nodes": 1, "max_steps": 4, "logger": None},
    "model": {
        "class_path": "embeddings.modules.NVEmbedModule",
        "init_args": {
            "backbone": {"name": "a", "gradient_checkpointing": False},
            "lora": None,
            "schedule": {"warmup_steps": 1, "total_steps": None},
        },
    },
    "data": {
        "class_path": "embeddings.data.EmbeddingDataModule",
        "init_args": {"batch_size": 8, "num_workers": 0, "sources": [{"name": "pairs", "path": "pairs.jsonl"}]},
    },
}


def changed(**values: Any) -> dict[str, Any]:
    """The run with other settings: `a__b` is the setting b of a."""
    run = deepcopy(RUN)
    for path, value in values.items():
        owner: Any = run
        *owners, name = path.split("__")
        for key in owners:
            owner = owner[int(key) if key.isdigit() else key]
        owner[name] = value
    return run


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (changed(seed_everything=1), "seed_everything is 0 there and 1 here"),
        (
            changed(model__class_path="embeddings.modules.CDEModule"),
            "model.class_path is 'embeddings.modules.NVEmbedModule' there and 'embeddings.modules.CDEModule' here",
        ),
        (changed(model__init_args__backbone__name="b"), "model.init_args.backbone.name is 'a' there and 'b' here"),
        (changed(model__init_args__lora={"rank": 4}), "model.init_args.lora is None there and {'rank': 4} here"),
        (changed(model__init_args__schedule__warmup_steps=2), "model.init_args.schedule.warmup_steps is 1 there"),
        (changed(data__init_args__batch_size=16), "data.init_args.batch_size is 8 there and 16 here"),
        (
            changed(data__init_args__sources__0__path="other.jsonl"),
            "data.init_args.sources[0].path is 'pairs.jsonl' there and 'other.jsonl' here",
        ),
        (changed(data__init_args__sources=[]), "data.init_args.sources is [{"),
    ],
)
def test_another_model_data_or_seed_is_another_run(given: dict[str, Any], says: str) -> None:
    assert (first_difference(RUN, given) or "").startswith(says)


@pytest.mark.parametrize(
    "given",
    [
        RUN,
        changed(seed_everything=True),
        changed(trainer__max_steps=9, trainer__logger={"class_path": "CSVLogger"}),
        changed(model__init_args__backbone__gradient_checkpointing=True),
        changed(model__init_args__schedule__total_steps=9),
        changed(model__init_args__new="an option that a later version has"),
        changed(data__init_args__num_workers=2),
        changed(trainer__devices=2),
        changed(trainer__devices=2, data__init_args__batch_size=4),
        changed(trainer__num_nodes=2, data__init_args__batch_size=4),
    ],
)
def test_how_and_how_long_it_is_trained_makes_no_other_run(given: dict[str, Any]) -> None:
    assert first_difference(RUN, given) is None


def test_a_checkpoint_that_does_not_say_is_of_no_other_run() -> None:
    assert first_difference({}, RUN) is None
    assert first_difference({}, changed(seed_everything=True)) is None
