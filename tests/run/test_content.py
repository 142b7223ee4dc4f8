"""The hashes by which a record tells models, data and rewards apart; of a model on the hub, in a made-up cache."""

import hashlib

from verl_clipx.run.content import hash_of_data, hash_of_model, hash_of_reward


def make_model(folder, **files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return str(folder)


def test_models_of_one_name_are_told_apart_and_copies_are_not(tmp_path):
    first = make_model(tmp_path / "a/base", config="{}", tokenizer="[1]")
    copy = make_model(tmp_path / "b/base", config="{}", tokenizer="[1]", notes="mine")
    others = [
        make_model(tmp_path / "c/base", config='{"layers": 2}', tokenizer="[1]"),
        make_model(tmp_path / "d/base", config="{}", tokenizer="[2]"),
        make_model(tmp_path / "e/base", config="{}"),
    ]
    assert hash_of_model(first) == hash_of_model(copy)
    assert len({hash_of_model(path) for path in (first, *others)}) == 4


def test_a_model_that_is_not_here_has_no_hash(tmp_path):
    for path in (None, "", str(tmp_path / "nowhere"), "nobody/has-this-model", str(make_model(tmp_path / "empty"))):
        assert hash_of_model(path) is None


def test_data_is_told_apart_by_content_and_order(tmp_path):
    files = {name: tmp_path / f"{name}/train.parquet" for name in "abc"}
    for name, file in files.items():
        file.parent.mkdir()
        file.write_text("rows" if name == "c" else name)
    a, b, c = map(str, files.values())
    assert len({hash_of_data(paths) for paths in ([a], [b], [c], [a, b], [b, a])}) == 5
    (tmp_path / "copy").write_text("a")
    assert hash_of_data([str(tmp_path / "copy")]) == hash_of_data([a])
    assert hash_of_data([]) is None and hash_of_data([a, "hdfs://x/train.parquet"]) is None


def test_a_reward_has_the_hash_of_its_file(tmp_path):
    file = tmp_path / "score.py"
    file.write_text("def score(): ...")
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    assert hash_of_reward(str(file)) == hash_of_reward(f"file://{file}") == expected
    assert hash_of_reward(None) is None and hash_of_reward(str(tmp_path / "none.py")) is None
