import json

import pytest
import yaml

from embeddings.common import TextSettings
from embeddings.models import Embedder, MeanPooling
from embeddings.models.model_card import (
    ImportFacts,
    TrainingFacts,
    add_scores,
    keeps_card,
    stated_languages,
    stated_licence,
    write_model_card,
)
from embeddings.models.model_files import is_own_card
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual

CONFIG = {
    "seed_everything": 3,
    "trainer": {"precision": "bf16-mixed", "max_epochs": 1, "max_steps": None, "default_root_dir": "/secret/place"},
    "model": {
        "class_path": "embeddings.modules.NVEmbedModule",
        "init_args": {
            "backbone": {"name": "all-MiniLM-L6-v2", "revision": None},
            "initial_model": "/secret/place/stage1",
            "loss": {"class_path": "embeddings.losses.InfoNCE", "init_args": {"temperature": 0.05}},
        },
    },
    "data": {
        "class_path": "embeddings.data.EmbeddingDataModule",
        "init_args": {
            "batch_size": 32,
            "cache_dir": "/secret/place/cache",
            "sources": [
                {"name": "faq", "path": "/secret/place/faq.jsonl", "licence": "CC BY 4.0"},
                {"name": "a|b <script>", "path": "hub:org/pairs", "licence": None},
            ],
        },
    },
}
RECORD = {"commit": "abc+", "world_size": 2, "source_rows": {"faq": 1234}}
FACTS = TrainingFacts(CONFIG, 36, RECORD, [(18, 0.5), (36, 0.625)])
SCORES = [
    {"name": "eval/faq", "kind": "retrieval", "metrics": {"ndcg_at_10": 0.7768, "mrr": 1.0}, "dimensions": None},
    {"name": "[x](evil)", "kind": "sts", "metrics": {"cosine_spearman": 0.5}, "dimensions": 8},
]


def embedder(**text):
    settings = TextSettings(64, 32, **text)
    return Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32), text=settings, trained_widths=(32, 8)).eval()


def card(folder, model, *arguments, **options):
    model.save_pretrained(folder)
    write_model_card(folder, model, *arguments, **options)
    return (folder / "README.md").read_text()


def front_matter(text):
    _, yaml_text, _ = text.split("---\n", 2)
    return yaml.safe_load(yaml_text)


def assert_has(text, *parts):
    assert [part for part in parts if part not in text] == []


def test_the_front_matter_is_what_the_hub_reads_with_scores_as_its_model_index(tmp_path):
    fields = front_matter(card(tmp_path / "model", embedder(), FACTS, licence="apache-2.0", scores=SCORES))
    (index,) = fields.pop("model-index")
    assert fields == {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "sentence-similarity", "feature-extraction"],
        "base_model": "sentence-transformers/all-MiniLM-L6-v2",
        "datasets": ["org/pairs"],
        "license": "apache-2.0",
    }
    assert index["name"] == "model"
    found = {result["dataset"]["name"]: (result["task"]["type"], result["metrics"]) for result in index["results"]}
    faq = [{"type": "ndcg_at_10", "value": 0.7768}, {"type": "mrr", "value": 1.0}]
    assert found["eval/faq"] == ("retrieval", faq)
    assert found["[x](evil)"] == ("sts", [{"type": "cosine_spearman", "value": 0.5}])
    assert front_matter(card(tmp_path / "other", embedder())).keys() == {"library_name", "pipeline_tag", "tags"}


def test_the_card_says_what_was_trained_on_what_and_with_which_scores(tmp_path):
    text = card(tmp_path / "model", embedder(prompts={"query": "q|`: "}), FACTS, scores=SCORES)
    assert_has(
        text,
        "vectors of 32 dimensions, trained to be cut to 32, 8",
        "| method | NVEmbedModule |",
        "| loss | InfoNCE |",
        "| optimiser steps | 36 |",
        "| faq | files | 1,234 | CC BY 4.0 |",
        r"| a\|b \<script\> | org/pairs | unknown | unknown |",
        "| eval/faq | retrieval | ndcg\\_at\\_10 | 0.777 | all |",
        r"\[x\](evil)",
        "0.625 after 36 steps",
        "temperature: 0.05",
        "batch_size: 32",
        ".../stage1",
        "| `'query'` | `'q∣’: '` |",
        "## Licence\n\nNot stated.",
    )
    assert [word for word in ("secret", "null", "curves.png") if word in text] == []
    (tmp_path / "model" / "curves.png").write_bytes(b"")
    write_model_card(tmp_path / "model", embedder(), FACTS)
    assert "(curves.png)" in (tmp_path / "model" / "README.md").read_text()
    # The next model of the folder has other curves or none.
    assert "curves.png" not in card(tmp_path / "model", embedder(), FACTS)


def test_the_card_of_an_imported_model_says_what_it_was_made_of(tmp_path):
    bases = ("org/base", "/secret/place/decoder")
    origin = ImportFacts("org/model", "abc|", bases, "LLM2Vec's adapters", None, 1234, 0)
    text = card(tmp_path / "model", embedder(), origin, licence="mit", name="mine")
    assert front_matter(text)["base_model"] == ["org/model", "org/base"]
    assert front_matter(text)["license"] == "mit"
    assert_has(
        text,
        "\n# mine\n",
        "SentenceTransformer('mine'",
        "| imported from | org/model |",
        r"| revision | abc\| |",
        "| merged into | org/base, .../decoder |",
        "| kind of checkpoint | LLM2Vec's adapters |",
        "| tensors read | 1,234 |",
        "| tensors left out | 0 |",
        "is in `import.json`",
        "## Licence\n\nmit, as the source states.",
    )
    assert [word for word in ("secret", "vectors as the card has them of", "## Training") if word in text] == []
    local = ImportFacts("/secret/place/model", None, (), "NV-Embed", "nomic-embed-text-v1.5", 1, 2)
    text = card(tmp_path / "local", embedder(), local)
    used_as = "| vectors as the card has them of | nomic-embed-text-v1.5 |"
    assert_has(text, "| imported from | .../model |", used_as, "## Licence\n\nThe source states none.")
    assert "revision" not in text
    assert "base_model" not in front_matter(text)


def test_the_usage_runs(tmp_path, monkeypatch, travelling_code):
    monkeypatch.chdir(tmp_path)
    for name, model in (
        ("plain", embedder()),
        ("with_code", embedder(prompts={"query": "q:"})),
        ("contextual", tiny_contextual()),
    ):
        text = card(tmp_path / name, model)
        assert ("trust_remote_code" in text) == ("custom_code" in text) == (name != "plain")
        blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
        assert len(blocks) == 2
        for block in blocks:
            names = {"documents_of_your_corpus": ["the lazy dog"]}
            exec(block, names)
            assert "similarity" in names or names["vectors"].shape == (1, 32)


def test_a_card_of_ours_goes_with_its_model_and_one_by_hand_stays(tmp_path):
    model = embedder()
    card(tmp_path / "model", model, FACTS)
    assert is_own_card(tmp_path / "model" / "README.md")
    model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model" / "README.md").exists()
    (tmp_path / "model" / "README.md").write_text("mine\n")
    assert card(tmp_path / "model", model, FACTS) == "mine\n"
    assert not is_own_card(tmp_path / "model" / "README.md")
    assert keeps_card(tmp_path / "model")
    assert not keeps_card(tmp_path / "nowhere")


def test_the_card_says_what_was_not_measured_and_what_the_base_states(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: MIT\nlanguage:\n- en\n- de\n---\n# base\n")
    config = {**CONFIG, "model": {"class_path": "a.B", "init_args": {"backbone": {"name": str(base)}}}}
    text = card(tmp_path / "model", embedder(), TrainingFacts(config, 1), licence="apache-2.0")
    assert_has(
        text,
        "- Longer texts are cut: queries at 64 tokens, documents at 32, prompt and special tokens included. "
        "The backbone has positions for 128.",
        "- The base names as languages: en, de. Those of the training texts were not checked.",
        "- Nothing was measured: no other domain or language, and neither bias nor safety.",
        "## Licence\n\napache-2.0. The base .../base states mit.\n",
    )
    assert "- Languages were neither declared nor checked." in card(tmp_path / "other", embedder())
    assert "- Measured is the validation score of the training" in card(tmp_path / "third", embedder(), FACTS)


def test_scores_beside_a_model_enter_its_card_then_or_later(tmp_path):
    folder = tmp_path / "model"
    model = embedder()
    model.save_pretrained(folder)
    (folder / "scores.json").write_text(json.dumps(SCORES))
    write_model_card(folder, model, FACTS, licence="mit")
    written = (folder / "README.md").read_text()
    assert len(front_matter(written)["model-index"][0]["results"]) == 2
    (folder / "scores.json").unlink()
    write_model_card(folder, model, FACTS, licence="mit")
    assert not add_scores(folder)
    assert "model-index" not in front_matter((folder / "README.md").read_text())
    (folder / "scores.json").write_text(json.dumps(SCORES))
    for _ in range(2):
        assert add_scores(folder)
        later = (folder / "README.md").read_text()
        assert front_matter(later) == front_matter(written)
        assert later == written
    (folder / "README.md").write_text("# mine")
    assert not add_scores(folder)
    assert (folder / "README.md").read_text() == "# mine"


@pytest.mark.parametrize("header", ["license: [", "language: {a: 1}", "language: [1, en, '../x']", "- a\n- b"])
def test_a_strange_header_of_a_base_states_nothing_strange(header, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    assert stated_languages(tmp_path) in ([], ["en"])
    assert stated_licence(tmp_path) is None
