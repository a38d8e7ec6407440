import pytest

from embeddings.cli.app import check_one_method, config_paths
from embeddings.cli.errors import ConfigError


def test_config_paths_are_found_in_every_spelling():
    assert config_paths(["fit", "--config", "a", "-c", "b", "--config=c", "--x", "d"]) == ["a", "b", "c"]


def test_two_method_configs_are_refused_by_name(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"model:\n  class_path: {name}\n")
    (tmp_path / "scale.yaml").write_text("trainer:\n  devices: 2\n")
    line = ["fit", "--config", str(tmp_path / "one.yaml"), "--config", str(tmp_path / "scale.yaml")]
    check_one_method(line)
    with pytest.raises(ConfigError, match=r"one\.yaml and .*two\.yaml both choose"):
        check_one_method([*line, "--config", str(tmp_path / "two.yaml")])


def test_a_config_that_is_no_yaml_names_the_file(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [1,\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not a YAML file"):
        check_one_method(["fit", "--config", str(tmp_path / "bad.yaml")])
