import json
import subprocess

from jaxlm.monitor import environment


def test_it_says_versions_devices_and_flags_in_json():
    facts = json.loads(json.dumps(environment.facts()))
    assert facts["packages"].keys() >= {"jax", "jaxlib", "flax", "numpy"}
    assert facts["backend"] == "cpu"
    assert facts["devices"] == {"cpu": 8}
    assert "xla_force_host_platform_device_count" in facts["variables"]["XLA_FLAGS"]


def test_a_secret_in_the_environment_is_not_written(monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_JAX_KEY"):
        monkeypatch.setenv(name, "hunter2")
    assert "hunter2" not in json.dumps(environment.facts())


def test_another_text_shows_in_the_digest_of_its_room(monkeypatch, tmp_path):
    def versions(place, texts):
        for file, text in texts.items():
            path = tmp_path / place / "jaxlm" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(environment, "ROOM", tmp_path / place / "jaxlm")
        return environment.versions()

    files = {"top.py": "1", "core/tree.py": "2", "corpus/run.py": "3"}
    here = versions("here", files)
    other = versions("there", files | {"corpus/run.py": "another", "optim/muon.py": "new"})
    changed = {name for name in here | other if here.get(name) != other.get(name)}
    assert changed == {"code of jaxlm/corpus", "code of jaxlm/optim"}
    assert here.keys() >= {"code of jaxlm", "code of jaxlm/core", "package jax"}


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


def test_git_state_is_the_commit_and_what_differs_from_it(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "remote", "add", "origin", "https://user:hunter2@host/x.git")
    state = environment.git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["changed"] == []
    (tmp_path / "a").write_text("2")
    changed = environment.git_state(tmp_path)
    assert changed["changed"] == ["a"]
    assert "hunter2" not in str(changed)


def test_a_folder_inside_another_checkout_has_no_state_of_its_own(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "site-packages").mkdir()
    assert environment.git_state(tmp_path / "site-packages") is None
