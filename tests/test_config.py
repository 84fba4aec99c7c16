import copy
import pickle

import pytest

from loco_fsdp import LoCoConfig

WRONG = [
    ("bits", 3),
    ("bits", "4"),
    ("bits", 4.0),
    ("bits", True),
    ("block_size", 100),
    ("block_size", 16),
    ("block_size", 2048),
    ("beta", 1.0),
    ("beta", -0.1),
    ("beta", float("nan")),
    ("beta", "0.9"),
    ("error_feedback", 1),
    ("error_dtype", "float64"),
    ("error_dtype", None),
    ("reset_interval", 0),
    ("reset_interval", 1.5),
    ("warmup_steps", -1),
    ("warmup_steps", None),
    ("topology", "ring"),
    ("node_size", 0),
    ("intra_node_bits", 4),
    ("weight_bits", 2),
    ("weight_bits", 8.0),
    ("min_numel", -5),
    ("backend", "cuda"),
    ("check_ranks", "yes"),
    ("guard", 0),
    ("guard", "0.5"),
    ("guard", True),
    ("guard", float("inf")),
    ("spike_limit", 1.0),
    ("spike_limit", "10"),
    ("spike_limit", True),
    ("spike_limit", float("inf")),
    ("spike_limit", float("nan")),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"LoCoConfig\.{field}=.*it must be") as error:
        LoCoConfig(**{field: value})
    assert repr(value) in str(error.value)


def test_defaults_are_those_of_the_documentation() -> None:
    assert LoCoConfig().to_dict() == {
        "bits": 4,
        "block_size": 256,
        "beta": 0.9,
        "error_feedback": True,
        "error_dtype": "float16",
        "reset_interval": 1024,
        "warmup_steps": 0,
        "topology": "auto",
        "node_size": None,
        "intra_node_bits": None,
        "min_numel": 0,
        "backend": "auto",
        "check_ranks": False,
        "guard": None,
        "spike_limit": 10.0,
        "weight_bits": None,
    }


def test_round_trips() -> None:
    config = LoCoConfig(bits=8, beta=0, reset_interval=None, error_dtype="int8")
    assert LoCoConfig.from_dict(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert len({config, copy.deepcopy(config), LoCoConfig()}) == 2


def test_an_unknown_key_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="no field 'bit'; its fields are bits, block_size"):
        LoCoConfig.from_dict({"bit": 4})


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError):
        LoCoConfig().bits = 8  # type: ignore[misc]
