"""What holds for every file of the house."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_source_file_has_its_mirror_test():
    sources = [p for p in (ROOT / "embeddings").rglob("*.py") if p.name != "__init__.py"]
    assert len(sources) >= 40
    missing = [
        str(path.relative_to(ROOT))
        for path in sources
        if not (ROOT / "tests" / path.relative_to(ROOT / "embeddings").parent / f"test_{path.name}").is_file()
    ]
    assert missing == []


def test_public_names_are_sorted():
    import ast

    listed = 0
    for path in (ROOT / "embeddings").rglob("__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                names = ast.literal_eval(node.value)
                assert names == sorted(names), path
                listed += 1
    assert listed >= 6


def test_no_file_names_a_path_of_a_machine():
    import re

    files = [p for p in ROOT.rglob("*") if p.suffix in {".py", ".yaml", ".md", ".cfg"} and ".venv" not in p.parts]
    files = [p for p in files if not {"checkpoints", "data", ".cache"} & set(p.relative_to(ROOT).parts[:1])]
    assert len(files) > 60
    pattern = re.compile(r"(?<![\w.])/(?:home|root|work|mnt|Users)/\w")
    assert [str(p) for p in files if p != Path(__file__) and pattern.search(p.read_text(encoding="utf-8"))] == []
