"""What a person reads of fairseq-eval-lm: a short log, a summary at its end, one sentence after Ctrl-C."""

import os
import re
import signal
import subprocess
import sys

import pytest
from commands import EVAL_FLAGS, KNN_TASK, REPO, eval_lm, eval_lm_here, fails_with, sentence_of

NOISE = r"Warning|DEBUG|'_name': None|can_reuse|\r|Traceback|nan\b"


def summary_of(text: str) -> dict[str, str]:
    """The rows of the summary, which is the end of the log."""
    *_, block = re.split(r"(?m)^(?:[\d:]+ )?done$", text)
    rows = [re.split(r"  +", line.strip(), maxsplit=1) for line in block.strip().splitlines()]
    assert all(len(row) == 2 for row in rows), block
    return dict(rows)


def test_dump_and_score_as_processes(corpus, adaptive_model, tmp_path):
    store = tmp_path / "store"
    dumped = eval_lm(corpus, adaptive_model, "--gen-subset", "train", "--knn-dump", store)
    log = dumped.stdout + dumped.stderr
    assert not re.search(NOISE, log), log
    assert "Loss (base 2)" not in log and "Evaluated" not in log
    rows = summary_of(log)
    assert rows["datastore"] == str(store) and "a dump computes no loss" in rows["loss"]
    assert f"--knn-datastore {store}" in rows["next"] and len(log) < 3000

    scoring = ["--gen-subset", "valid", "--knn-datastore", store, "--knn-save", tmp_path / "save"]
    scored = eval_lm(corpus, adaptive_model, *scoring)
    log = scored.stdout + scored.stderr
    assert not re.search(NOISE, log), log
    rows = summary_of(log)
    perplexity = re.search(r"Loss \(base 2\): [\d.]+, Perplexity: ([\d.]+)", log)[1]
    assert rows["perplexity of the mixture"].split()[0] == perplexity
    assert rows["perplexity of the LM"] == re.search(r"base LM loss .*?, perplexity ([\d.]+)", log)[1]
    assert {"perplexity of the oracle", "hit rate in store", "time", "speed", "memory"} <= rows.keys()
    assert rows["next"] == f"knnlm tune {tmp_path / 'save'}"
    # fairseq's own lines stay, and the summary comes after them
    assert re.search(r"Evaluated [\d,]+ tokens in [\d.]+s \([\d.]+ tokens/s\)", log)
    assert log.index("Loss (base 2)") < log.index("perplexity of the LM")


def test_everything_on_demand(corpus, adaptive_model):
    result = eval_lm(corpus, adaptive_model, env=os.environ | {"KNNLM_VERBOSE": "1"})
    assert "'_name': None" in result.stdout + result.stderr and "Warning" in result.stderr


def test_summaries_in_this_process(evaluate, corpus, adaptive_model, dump):
    """One run after the other: each ends with its own summary."""
    cached = evaluate(corpus, adaptive_model, "--knn-cache-size", "20").log
    assert "hit rate in the cache" in cached and cached.count("perplexity of the LM") == 1
    bare = evaluate(corpus, adaptive_model).log
    assert "perplexity of the LM" in bare and "oracle" not in bare
    assert "perplexity of the LM" not in evaluate(corpus, adaptive_model, stock=True).log


def test_progress_of_a_run(evaluate, corpus, adaptive_model, dump, monkeypatch):
    """Every token of the split is counted once, with and without a datastore."""
    from fairseq_knnlm.progress import progress

    store, seen = dump("train"), {}

    class Spy(progress):
        def close(self):
            seen[self._name] = (self._done, self._total)
            super().close()

    for module in ("tasks.eval_lm", "tasks.scorer", "tasks.dumping"):
        monkeypatch.setattr(f"fairseq_knnlm.{module}.progress", Spy)
    tokens = len(evaluate(corpus, adaptive_model).scores)
    assert seen == {"scoring": (tokens, tokens)}
    evaluate(corpus, adaptive_model, "--knn-datastore", store)
    assert seen == {"scoring": (tokens, tokens), "model": (tokens, tokens)}


def test_ctrl_c(corpus, adaptive_model, tmp_path):
    """The whole group of processes gets the signal, as from a keyboard."""
    store = tmp_path / "store"
    command = [sys.executable, "-m", "fairseq_cli.eval_lm", corpus, "--path", adaptive_model, *EVAL_FLAGS, *KNN_TASK]
    # As long as somebody holds the lock of a shard, the dump waits: there it is interrupted.
    flags = ["--gen-subset", "train", "--knn-dump", store]
    script = (
        "import time; from fairseq_cli.eval_lm import cli_main\n"
        # fairseq imports a user folder only if nobody else has
        "import fairseq_knnlm.tasks.knn_language_modeling, fairseq_knnlm.datastore.writing as w\n"
        "def wait(self, *a, **k):\n    print('waiting', flush=True); time.sleep(600)\n"
        "w.DatastoreWriter.open_shard = wait\n"
        "cli_main()"
    )
    command = [sys.executable, "-c", script, *command[3:], *flags]
    child = subprocess.Popen(
        list(map(str, command)), cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert any("waiting" in line for line in child.stdout)
    os.killpg(child.pid, signal.SIGINT)
    _, log = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in log
    last = log.strip().splitlines()[-1]
    assert last == f"interrupted; the finished shards are in {store}; run the same command again to continue"


def test_ctrl_c_while_scoring(evaluate, corpus, adaptive_model, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("fairseq_knnlm.tasks.scorer.score_tokens", interrupt)
    with pytest.raises(KeyboardInterrupt, match="scoring does not resume; run the same command again"):
        evaluate(corpus, adaptive_model)


def test_mistyped_flags(corpus, adaptive_model):
    result = eval_lm(corpus, adaptive_model, "--knn-datastor", "x", check=False)
    fails_with(result, "did you mean --knn-datastore?")
    result = eval_lm(corpus, adaptive_model, "--task", "language_modeling", "--knn-datastore", "x", check=False)
    fails_with(result, "is a flag of --task knn_language_modeling")


def test_data_without_a_dictionary(corpus, adaptive_model, tmp_path):
    sentence = sentence_of(eval_lm_here, tmp_path, adaptive_model)
    assert "has no dict.txt; give the folder that fairseq-preprocess wrote" in sentence
    assert "is no folder with a dict.txt" in sentence_of(eval_lm_here, tmp_path / "nowhere", adaptive_model)


def test_files_that_cannot_be_used(corpus, tmp_path):
    """A checkpoint that is not there; a folder that nothing can be written to, for root neither."""
    fails_with(eval_lm(corpus, tmp_path / "no.pt", check=False), "Model file not found", "fairseq-train")


@pytest.mark.parametrize("folder", ["/proc/nothing/store", "/dev/null/store", "/sys/store"])
def test_impossible_folders(corpus, adaptive_model, dump, folder, evaluate):
    sentence = sentence_of(evaluate, corpus, adaptive_model, "--knn-dump", folder, split="train")
    assert folder in sentence and re.search("cannot be written|not a folder|cannot be used", sentence)
