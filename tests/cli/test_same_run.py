import inspect
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, get_args, get_type_hints

import pytest

from embeddings import data, modules
from embeddings.cli.resume import first_difference

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
        "init_args": {
            "batch_size": 8,
            "num_workers": 0,
            "sampler": {"class_path": "CurriculumBatchSampler", "init_args": {"total_steps": None}},
            "sources": [{"name": "pairs", "path": "pairs.jsonl", "licence": None}],
        },
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
        (
            changed(data__init_args__sources__0__path="other.jsonl"),
            "data.init_args.sources[0].path is 'pairs.jsonl' there and 'other.jsonl' here",
        ),
        (changed(data__init_args__sources=[]), "data.init_args.sources is [{"),
        (
            changed(data__init_args__sampler__init_args__total_steps=9),
            "data.init_args.sampler.init_args.total_steps is",
        ),
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
        changed(data__init_args__sources__0__licence="apache-2.0"),
        changed(model__init_args__new="an option that a later version has"),
        changed(data__init_args__num_workers=2),
        changed(trainer__devices=2),
        changed(data__init_args__batch_size=16),  # the plan in the checkpoint says what of it must be the same
        changed(trainer__devices=2, data__init_args__batch_size=4),
        changed(trainer__num_nodes=2, data__init_args__batch_size=4),
    ],
)
def test_how_and_how_long_it_is_trained_makes_no_other_run(given: dict[str, Any]) -> None:
    assert first_difference(RUN, given) is None


def test_a_checkpoint_that_does_not_say_is_of_no_other_run() -> None:
    assert first_difference({}, RUN) is None
    assert first_difference({}, changed(seed_everything=True)) is None


# Every option of a method, of data, and of what they are made of. With another value of the first it is the same run.
FREE = {
    "BackboneConfig": "attn_implementation gradient_checkpointing compile",
    "EmbeddingDataModule": "batch_size num_workers cache_dir",
    "FromScratch": "attn_implementation",
    "HeadSettings": "tile_logits",
    "InfoNCE": "tile_size",
    "MoEEmbedModule": "expert_backend",
    "Schedule": "total_steps",
    "SourceConfig": "licence",
    "TextDataModule": "batch_size num_workers cache_dir",
}
DECIDING = {
    "AnchorTokenPooling": "axis layers per_head include_first detach by_visible_queries",
    "BackboneConfig": "name revision bidirectional dtype dropout num_layers",
    "BlendedBatchSampler": "proportions steps_per_epoch num_replicas rank temperature",
    "CDEModule": (
        "backbone first_stage_backbone context loss optimizer schedule initial_model normalize seed "
        "first_stage_training"
    ),
    "ClusteredBatchSampler": "clusters order across_ranks num_replicas rank",
    "ContextSettings": (
        "num_context max_length include_negatives dropout_fraction num_soft_prompts residual_projection"
    ),
    "CurriculumBatchSampler": "inner order fractions level missing_level total_steps num_replicas rank",
    "EmbeddingDataModule": "sources text num_negatives sampler seed tokenizer num_in_context_examples",
    "FirstStageTraining": "learning_rate_factor frozen_steps word_steps",
    "FromScratch": "tokenizer model_type settings bidirectional",
    "HeadSettings": "new train_beside_lora",
    "HomogeneousBatchSampler": "proportions temperature num_replicas rank",
    "InfoNCE": (
        "temperature learnable_temperature in_batch_negatives directions gather_across_devices similarity "
        "false_negative_filter mask_same_text mask_same_class"
    ),
    "LatentAttentionPooling": "num_latents num_heads head_dim paper_literal zero_init_residual",
    "LoadBalancing": "coefficient normalization z_coefficient",
    "LoraSettings": "rank alpha dropout target_modules",
    "MGHCurriculumModule": "backbone pooling lora loss optimizer schedule initial_model normalize seed",
    "MaskedLMModule": "objective backbone from_scratch masking lora head separate_documents optimizer schedule seed",
    "Masking": "probability mask_fraction random_fraction mask_token",
    "MatryoshkaInfoNCE": "widths weights",
    "MoEEmbedModule": (
        "backbone pooling lora upcycling load_balancing loss optimizer schedule initial_model normalize seed"
    ),
    "NVEmbedModule": "backbone pooling lora loss optimizer schedule initial_model normalize seed",
    "Schedule": "warmup_steps decay",
    "SelfAttentionPooling": "num_heads zero_init_residual",
    "SourceConfig": (
        "name path conversion subset split revision columns instruction query_prompt document_prompt "
        "symmetric in_batch_negatives weight max_rows seed label_texts num_negatives single_text_classes "
        "min_score suspect_rows surrogate_vectors"
    ),
    "SurrogateFilter": "margin threshold spare_own_negatives",
    "TextDataModule": "sources validation_sources row_length append_eos sampler seed tokenizer",
    "TextSettings": (
        "query_max_length document_max_length prompts append_eos pool_prompt suffix pool_start "
        "instruction_template pooling_rule"
    ),
    "TextSource": "name path packages column subset split revision weight",
    "Upcycling": "mode num_experts top_k first every noise",
}


def _options(kind: Any, path: str, num_given: int = 0, above: tuple[Any, ...] = ()) -> Iterator[tuple[str, str]]:
    """The options of a class and of the classes of ours that they are, each as `Class.option`, with its path."""
    hints = get_type_hints(kind.__init__)
    for parameter in list(inspect.signature(kind).parameters.values())[num_given:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        place = f"{path}.{parameter.name}"
        yield f"{kind.__name__}.{parameter.name}", place
        for part, given in _parts(hints[parameter.name]):
            if part not in above:
                yield from _options(part, place, given, (*above, kind))


def _parts(hint: Any, num_given: int = 0) -> Iterator[tuple[Any, int]]:
    """The classes of ours in a type, and how many of their first arguments are not the config's."""
    arguments = get_args(hint)
    if arguments and isinstance(arguments[0], list):
        yield from _parts(arguments[1], len(arguments[0]))
        return
    if inspect.isclass(hint) and hint.__module__.startswith("embeddings."):
        yield from ((kind, num_given) for kind in _with_subclasses(hint))
    for argument in arguments:
        yield from _parts(argument)


def _with_subclasses(kind: Any) -> list[Any]:
    below = [one for child in kind.__subclasses__() for one in _with_subclasses(child)]
    return [kind, *(one for one in below if one.__module__.startswith("embeddings."))]


def test_every_option_is_free_or_decides_the_run() -> None:
    methods = [getattr(modules, name) for name in modules.__all__ if name.endswith("Module")]
    methods = [kind for kind in methods if kind is not modules.ContrastiveModule]
    assert len(methods) == 5
    made: dict[str, list[Any]] = {"model": methods, "data": [data.EmbeddingDataModule, data.TextDataModule]}
    # A name is loaded when it is asked for, and only then a subclass of its base.
    assert all(hasattr(data, name) for name in data.__all__)
    found: dict[str, bool] = {}
    for part, kinds in made.items():
        for option, path in (pair for kind in kinds for pair in _options(kind, f"{part}.init_args")):
            one, other = ({part: _nested(path.split(".")[1:], value)} for value in (1, 2))
            is_free = first_difference(one, other) is None
            assert found.setdefault(option, is_free) == is_free, path
    listed = {
        f"{kind}.{name}": is_free
        for is_free, lists in ((True, FREE), (False, DECIDING))
        for kind, names in lists.items()
        for name in names.split()
    }
    assert found == listed


def _nested(keys: list[str], value: int) -> Any:
    return {keys[0]: _nested(keys[1:], value)} if keys else value
