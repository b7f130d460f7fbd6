"""The command knnlm as a whole: spellings of flags, what it loads, what it says when it fails."""

import importlib
import sys

import pytest
from commands import KNN_TASK, fails_with, knnlm, run

from fairseq_knnlm.cli.parsing import KNN_FLAGS, other_spelling
from fairseq_knnlm.errors import KnnlmError, resumable
from fairseq_knnlm.tasks.config import flags

main_module = importlib.import_module("fairseq_knnlm.cli.main")  # the package has a function of this name


def test_the_flags_are_those_of_the_task():
    assert {f"--knn-{name}" for name in KNN_FLAGS} == set(flags())


def test_both_spellings():
    assert other_spelling("--knn-k") == "--k" and other_spelling("--k") == "--knn-k"
    assert other_spelling("--json") is None and other_spelling("datastore") is None and other_spelling("-o") is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["info", "store"], {"datastore": "store"}),
        (["info", "--datastore", "store"], {"datastore": "store"}),
        (["verify", "--knn-datastore", "store"], {"datastore": "store"}),
        (["build", "store", "--knn-index", "flat", "--knn-metric", "ip"], {"index": "flat", "metric": "ip"}),
        (["neighbors", "--knn-datastore", "a", "--queries", "b", "--knn-k", "2", "-o", "c"],
         {"datastore": "a", "k": 2}),
        (["sweep", "save", "--over", "k", "--knn-lambda", "0.1", "--knn-cache-theta=2"],
         {"lambda": "0.1", "cache_theta": "2"}),
        (["score", "--path", "p", "--data", "d", "--datastore", "a", "--k", "8", "--lambda", "0.5", "--metric", "ip"],
         {"knn_datastore": "a", "knn_k": "8", "knn_lambda": "0.5", "knn_metric": "ip"}),
        (["inspect", "--path", "p", "--data", "d", "--knn-datastore", "a", "--nprobe", "8", "--text", "x"],
         {"knn_datastore": "a", "knn_nprobe": 8}),
        (["spalm", "neighbors", "table", "--data", "d", "--knn-datastore", "a"], {"datastore": "a"}),
    ],
)  # fmt: skip
def test_every_command_takes_both_spellings(command, expected):
    args = main_module._parser().parse_args(command)
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["innfo", "x"], "did you mean info?"),
        (["info", "x", "--jsn"], "knnlm info: error: unrecognized arguments: --jsn; did you mean --json?"),
        (["info"], "the following arguments are required: DIR"),
        (["score", "--path", "p", "--data", "d", "--knn-temprature", "3"], "did you mean --knn-temperature?"),
        (["spalm", "gate", "--path", "p"], "did you mean gates?"),
    ],
)
def test_near_matches(capsys, command, sentence):
    with pytest.raises(SystemExit) as error:
        knnlm(*command)
    assert error.value.code == 2 and sentence in capsys.readouterr().err


def test_info_loads_next_to_nothing(store):
    script = (
        f"import sys; from fairseq_knnlm.cli import main; code = main(['info', {str(store.folder)!r}])\n"
        "sys.exit(code or len({'torch', 'fairseq', 'faiss', 'omegaconf'} & set(sys.modules)))"
    )
    result = run(sys.executable, "-c", script)
    assert "3,000" in result.stdout


def test_without_faiss(store):
    """knnlm info works; what needs faiss says what to install."""
    script = "import sys; sys.modules['faiss'] = None; from fairseq_knnlm.cli import main; sys.exit(main(sys.argv[1:]))"
    result = run(sys.executable, "-c", script, "info", store.folder)
    assert "3,000" in result.stdout
    hidden = (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'faiss' else real(name, *a)\n"
    )
    for how in ("", hidden):
        result = run(sys.executable, "-c", how + script, "build", store.folder, check=False)
        fails_with(result, "faiss is missing", "pip install")


def test_user_dir(capsys):
    assert knnlm("user-dir") == 0
    assert capsys.readouterr().out.strip() == str(KNN_TASK[1])
    with pytest.raises(SystemExit):
        knnlm("--help")
    assert "--user-dir $(knnlm user-dir)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "interrupted; what is finished stays; run the same command again"),
        (KnnlmError("no luck; try again"), 1, "error: no luck; try again"),
        (PermissionError(13, "Permission denied", "/x/y"), 1, "error: /x/y cannot be used: Permission denied"),
        (OSError("odd"), 1, "error: a file cannot be used: odd"),
    ],
)
def test_one_sentence(capsys, monkeypatch, error, code, sentence):
    def fail(args):
        raise error

    monkeypatch.setattr(main_module, "_user_dir", fail)
    assert knnlm("user-dir") == code
    assert capsys.readouterr().err == f"{sentence}\n"
    monkeypatch.setenv("KNNLM_VERBOSE", "1")
    with pytest.raises(type(error)):
        knnlm("user-dir")


def test_the_innermost_knows_how_to_go_on():
    with pytest.raises(KeyboardInterrupt, match="inside"), resumable("outside"), resumable("inside"):
        raise KeyboardInterrupt


def test_a_reader_that_has_enough(store):
    """knnlm info | head -1 ends without a word."""
    result = run("bash", "-c", f"{sys.executable} -m fairseq_knnlm.cli info {store.folder} --json | head -n 1")
    assert result.stdout == "{\n" and result.stderr == ""
