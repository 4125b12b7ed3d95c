import numpy as np
import pytest

from ops.dtypes import FLOAT_NAMES, item_bytes, name_of_storage, storage_dtype
from ops.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "nbytes", "storage"),
    [
        ("bfloat16", 2, np.uint16),
        ("float16", 2, np.float16),
        ("float32", 4, np.float32),
        ("float64", 8, np.float64),
    ],
)
def test_a_format_has_a_size_and_a_storage_and_is_found_by_it(name, nbytes, storage):
    assert item_bytes(name) == nbytes
    assert storage_dtype(name) == np.dtype(storage)
    assert name_of_storage(storage) == name
    assert name_of_storage(np.dtype(storage)) == name
    assert name in FLOAT_NAMES


@pytest.mark.parametrize("name", ["bf16", "Float32", "int8", "", "float8_e4m3fn"])
def test_an_unknown_name_is_refused_with_the_valid_ones(name):
    with pytest.raises(ConfigError, match=r"bfloat16, float16, float32, float64") as caught:
        storage_dtype(name)
    assert repr(name) in str(caught.value)
    with pytest.raises(ConfigError):
        item_bytes(name)


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.bool_, ">f4", "V2"])
def test_a_numpy_dtype_that_stores_no_format_is_refused(dtype):
    with pytest.raises(ConfigError, match="stores no supported format"):
        name_of_storage(np.dtype(dtype))
