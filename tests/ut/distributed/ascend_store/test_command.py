"""The command that looks after embedded pools: what it removes, and what it says when it can't."""

from vllm_ascend_ext.kv_pool.__main__ import main
from vllm_ascend_ext.kv_pool.backend.local import LocalBackend


def test_a_kept_pool_is_removed_once(tmp_path, capsys):
    pool = str(tmp_path / "pool")
    LocalBackend(pool, 1 << 16, keep=True).close()
    assert main(["remove", pool]) == 0
    assert main(["remove", pool]) == 1
    assert f"there is no such pool: no {pool}" in capsys.readouterr().out
    assert not (tmp_path / "pool").exists()


def test_a_pool_in_use_is_removed_only_by_force(tmp_path, capsys):
    pool = str(tmp_path / "pool")
    client = LocalBackend(pool, 1 << 16)
    assert main(["remove", pool]) == 2
    assert pool in capsys.readouterr().err
    assert main(["remove", pool, "--force"]) == 0
    client.close()


def test_a_name_that_cannot_be_a_pool_is_an_error_that_names_it(capsys):
    assert main(["remove", "a/b"]) == 2
    assert "a/b" in capsys.readouterr().err
