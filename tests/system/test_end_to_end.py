"""The real commands on a small model: dump, index, score, against brute force."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from commands import KNN_TASK, REPO, eval_lm_here, run
from reference import SAME_SCORES, has_tie, knn_probability, load, mixture, similarities

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index_if_missing

TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def queries(dump):
    """The valid split as queries in full precision, and its targets."""
    return load(Datastore(dump("valid", "--knn-key-dtype", "float32")))


@pytest.fixture
def lm_scores(evaluate, corpus, adaptive_model):
    return evaluate(corpus, adaptive_model).scores


# --- the bare LM ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["adaptive_model", "plain_model"])
@pytest.mark.parametrize("window", [("--context-window", 0), ("--context-window", 32)])
def test_without_flags_the_stock_loss(evaluate, corpus, model, window, request):
    model = request.getfixturevalue(model)
    ours, stock = evaluate(corpus, model, *window), evaluate(corpus, model, *window, stock=True)
    assert ours.loss == pytest.approx(stock.loss, abs=1e-6)
    np.testing.assert_allclose(ours.scores, stock.scores, atol=SAME_SCORES)


def test_lambda_zero_is_the_stock_loss(evaluate, corpus, adaptive_model, dump):
    ours = evaluate(corpus, adaptive_model, "--knn-datastore", dump("train"), "--knn-lambda", "0")
    stock = evaluate(corpus, adaptive_model, stock=True)
    assert ours.loss == pytest.approx(stock.loss, abs=1e-6)


def test_add_bos_token(evaluate, corpus, adaptive_model):
    flags = ("--add-bos-token", "--tokens-per-sample", "60")
    ours, stock = (evaluate(corpus, adaptive_model, *flags, stock=stock) for stock in (False, True))
    assert ours.loss == pytest.approx(stock.loss, abs=1e-6)


# --- mixtures against brute force -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "temperature", "metric", "flags"),
    [
        (8, 1.0, "l2", ("--knn-index", "flat")),
        (1024, 0.5, "l2", ("--knn-index", "flat")),
        (16, 5.0, "ip", ("--knn-index", "flat")),
        (1_000_000, 5.0, "l2", ("--knn-index", "flat")),  # more than there are
        ("all", 5.0, "l2", ("--knn-index", "flat")),
        ("all", 5.0, "ip", ("--knn-index", "flat")),
        # every cluster visited: an index with the keys themselves is exact too
        (16, 1.0, "l2", ("--knn-index", "IVF16,SQfp16", "--knn-nprobe", "16")),
        (16, 5.0, "ip", ("--knn-index", "IVF16,SQfp16", "--knn-nprobe", "16")),
        ("all", 1.0, "l2", ("--knn-index", "IVF16,SQfp16", "--knn-nprobe", "16")),
        ("all", 0.5, "ip", ("--knn-index", "IVF16,Flat", "--knn-nprobe", "16")),
        ("all", 1.0, "l2", ("--knn-index", "PCA32,IVF16,PQ8", "--knn-nprobe", "16")),  # keys from the datastore
        (16, 1.0, "l2", ("--knn-index", "IVF16,PQ8", "--knn-mask", "exact")),
        (1_000_000, 1.0, "l2", ("--knn-index", "IVF16,PQ8", "--knn-nprobe", "16")),  # rescoring all of them is exact
    ],
)
def test_mixture_equals_brute_force(
    evaluate, corpus, adaptive_model, dump, queries, lm_scores, k, temperature, metric, flags
):
    ours = evaluate(
        corpus, adaptive_model, "--knn-datastore", dump("train"), "--knn-k", k, "--knn-temperature", temperature,
        "--knn-metric", metric, "--knn-lambda", "0.3", *flags,
    )  # fmt: skip
    keys, values = load(Datastore(dump("train")))
    k = len(keys) if k == "all" else k
    p_knn = knn_probability(*queries, keys, values, k, temperature, metric)
    clear = ~has_tie(queries[0], keys, k, metric)
    assert clear.mean() > 0.95
    np.testing.assert_allclose(ours.scores[clear], mixture(lm_scores, [p_knn], [0.3])[clear], atol=TOLERANCE)


@pytest.mark.parametrize("mask", ["index", "exact"])
@pytest.mark.parametrize("score", ["index", "exact"])
def test_mask_and_score(evaluate, corpus, adaptive_model, dump, queries, lm_scores, mask, score):
    """The four combinations of Xu et al., against FAISS used by hand."""
    import faiss

    folder = dump("train")
    ours = evaluate(
        corpus, adaptive_model, "--knn-datastore", folder, "--knn-index", "IVF16,PQ8", "--knn-nprobe", "4",
        "--knn-k", "32", "--knn-temperature", "1", "--knn-lambda", "0.3", "--knn-mask", mask, "--knn-score", score,
    )  # fmt: skip
    keys, values = load(Datastore(folder))
    keys = keys.astype(np.float32)
    build_index_if_missing(Datastore(folder), "IVF16,PQ8", "l2")  # the exact neighbours with exact distances need none
    index = faiss.read_index(str(folder / "index" / "IVF16_PQ8" / "index.faiss"))
    index.nprobe = 4
    index.make_direct_map()
    if mask == "index":
        _, ids = index.search(queries[0], 32)
    else:
        ids = np.argsort(-similarities(queries[0], keys), axis=1, kind="stable")[:, :32]
    vectors = keys[ids] if score == "exact" else index.reconstruct_batch(ids.ravel()).reshape(*ids.shape, -1)
    distances = ((vectors - queries[0][:, None]) ** 2).sum(axis=2)
    weights = np.exp(distances.min(axis=1, keepdims=True) - distances) * (ids >= 0)
    matches = values[ids] == queries[1][:, None]
    p_knn = (weights * matches).sum(axis=1) / weights.sum(axis=1)
    np.testing.assert_allclose(ours.scores, mixture(lm_scores, [p_knn], [0.3]), atol=5e-4)


def test_two_datastores(evaluate, corpus, adaptive_model, dump, queries, lm_scores):
    stores = [dump("train"), dump("test", "--knn-key", "output", "--knn-layer", "0")]
    ours = evaluate(
        corpus, adaptive_model, "--knn-datastore", f"{stores[0]},{stores[1]}", "--knn-lambda", "0.3,0.1", "--knn-k", 8,
        "--knn-temperature", "1,2",
    )  # fmt: skip
    other_key = ("--knn-key", "output", "--knn-layer", "0")
    other_queries = load(Datastore(dump("valid", *other_key, "--knn-key-dtype", "float32")))
    p_knn = [
        knn_probability(*q, *load(Datastore(store)), 8, temperature)
        for q, store, temperature in zip((queries, other_queries), stores, (1.0, 2.0))
    ]
    np.testing.assert_allclose(ours.scores, mixture(lm_scores, p_knn, [0.3, 0.1]), atol=TOLERANCE)


def test_plain_softmax_model(evaluate, corpus, plain_model, dump):
    lm = evaluate(corpus, plain_model).scores
    store = dump("train", model=plain_model)
    valid = load(Datastore(dump("valid", "--knn-key-dtype", "float32", model=plain_model)))
    ours = evaluate(corpus, plain_model, "--knn-datastore", store, "--knn-k", 8, "--knn-temperature", 1).scores
    p_knn = knn_probability(*valid, *load(Datastore(store)), 8)
    np.testing.assert_allclose(ours, mixture(lm, [p_knn], [0.25]), atol=TOLERANCE)


def test_word_stats_and_summary(evaluate, corpus, adaptive_model, dump):
    result = evaluate(corpus, adaptive_model, "--knn-datastore", dump("train"), "--output-word-stats")
    assert "base LM loss" in result.log and "hit rate" in result.log and "search" in result.log
    assert "\tFalse\t" in result.log  # a line of word statistics


@pytest.mark.parametrize("flags", [("--knn-k", "16", "--knn-index", "IVF16,PQ8"), ("--knn-k", "all")])
def test_result_does_not_depend_on_batches(evaluate, corpus, adaptive_model, dump, flags):
    if flags[1] == "all":
        flags = (*flags, "--knn-index", "IVF16,SQfp16")
    flags = ("--knn-datastore", dump("train"), "--knn-nprobe", 4, *flags)
    expected = evaluate(corpus, adaptive_model, *flags).scores
    for other in (
        ("--max-tokens", 64),
        ("--max-tokens", 8192),
        ("--softmax-batch", 100),
        ("--num-workers", 0),
        ("--num-workers", 2),
    ):
        np.testing.assert_allclose(evaluate(corpus, adaptive_model, *flags, *other).scores, expected, atol=2e-5)
    parts = [
        evaluate(corpus, adaptive_model, *flags, "--num-shards", 3, "--shard-id", shard).scores for shard in range(3)
    ]
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-5)


def test_works_under_python_m_and_as_console_command(corpus, adaptive_model, dump):
    """eval_lm is __main__ in the one and fairseq_cli.eval_lm in the other."""
    flags = [
        corpus, *KNN_TASK, "--path", adaptive_model, "--cpu", "--tokens-per-sample", "64", "--gen-subset", "valid",
        "--knn-datastore", dump("train"),
    ]  # fmt: skip
    command = [sys.executable, "-c", "import sys; from fairseq_cli.eval_lm import cli_main; sys.exit(cli_main())"]
    outputs = [run("fairseq-eval-lm", *flags), run(*command, *flags)]
    texts = [output.stdout + output.stderr for output in outputs]
    losses = [re.search(r"Loss .base 2.: .*", text)[0] for text in texts]
    assert losses[0] == losses[1]
    assert all("hit rate" in text for text in texts)


# --- dumping --------------------------------------------------------------------------------------------------------


def test_every_token_once_in_order(corpus, dump):
    from fairseq.data import data_utils

    lines = data_utils.load_indexed_dataset(str(corpus / "train"))
    tokens = np.concatenate([lines[i].numpy() for i in range(len(lines))])
    np.testing.assert_array_equal(Datastore(dump("train")).values, tokens)


def test_dump_does_not_depend_on_batches_workers_or_parts(corpus, adaptive_model, dump, tmp_path):
    expected = {path.name: path.read_bytes() for path in dump("train").glob("*.npy")}
    assert len(expected) > 2
    ways = [
        [("--max-tokens", "64")],
        [("--num-workers", "2", "--max-tokens", "8192")],
        [("--num-shards", "3", "--shard-id", str(part)) for part in (2, 0, 1)],
    ]
    for number, runs in enumerate(ways):
        folder = tmp_path / str(number)
        for flags in runs:
            eval_lm_here(corpus, adaptive_model, "--gen-subset", "train", "--knn-dump", folder, *flags)
        assert {path.name: path.read_bytes() for path in folder.glob("*.npy")} == expected
        Datastore(folder)  # complete


def test_killed_dump_resumes(corpus, adaptive_model, dump, tmp_path, caplog):
    folder = tmp_path / "store"
    # Writing what it has after every batch: in groups, this little text would be written at once.
    one_by_one = "from fairseq_knnlm.tasks import knn_language_modeling as task; task.CPU_GROUP_TOKENS = 1"
    main = f"{one_by_one}; from fairseq_cli.eval_lm import cli_main; cli_main()"
    command = [
        sys.executable, "-c", main, corpus, "--user-dir", "fairseq_knnlm", "--task", "knn_language_modeling",
        "--path", adaptive_model, "--cpu", "--tokens-per-sample", "64", "--context-window", "32", "--max-tokens", "64",
        "--gen-subset", "train", "--knn-dump", folder, "--no-progress-bar",
    ]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 60
    while len(list(folder.glob("shard-*.json"))) < 3 and time.time() < deadline and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    records = [path.stem.removeprefix("shard-") for path in folder.glob("shard-*.json")]  # of what is whole
    finished = {name: (folder / name).stat().st_mtime_ns for name in (f"keys-{number}.npy" for number in records)}
    assert finished, "killed too late or too early for the test to mean anything"
    caplog.set_level("INFO")
    eval_lm_here(corpus, adaptive_model, "--gen-subset", "train", "--knn-dump", folder)
    assert "complete already" not in caplog.text
    for path in dump("train").glob("*.npy"):
        assert path.read_bytes() == (folder / path.name).read_bytes()
    assert all((folder / name).stat().st_mtime_ns == modified for name, modified in finished.items())
    assert not list(folder.glob("*.tmp*")) and not list(folder.glob("shard-*.json"))
    eval_lm_here(corpus, adaptive_model, "--gen-subset", "train", "--knn-dump", folder)
    assert "complete already" in caplog.text


def test_all_keys_and_layers_are_the_states_they_name(corpus, adaptive_model, dump):
    """The six states, recomputed from the residual stream of a forward pass."""
    import torch
    import torch.nn.functional as F
    from fairseq import checkpoint_utils

    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(adaptive_model)], {"data": str(corpus)})
    model.eval()
    tokens = torch.from_numpy(Datastore(dump("valid")).values[:31].astype(np.int64))
    source = torch.cat([torch.tensor([2]), tokens])[None, :-1]
    with torch.no_grad():
        _, extra = model(source, features_only=True)
        states = extra["inner_states"]  # T x B x C: embedding, layer 0, layer 1
        for number, layer in enumerate(model.decoder.layers):
            x = states[number]
            mask = model.decoder.buffered_future_mask(x)
            normed = layer.self_attn_layer_norm(x)
            attended = x + layer.self_attn(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
            last = number == 1
            norm = model.decoder.layer_norm if last else (lambda state: F.layer_norm(state, state.shape[-1:]))
            expected = {
                "attn_input": x,
                "attn_input_ln": normed,
                "ffn_input": attended,
                "ffn_input_ln": layer.final_layer_norm(attended),
                "output": states[number + 1],
                "output_ln": norm(states[number + 1]),
            }
            for key, state in expected.items():
                flags = ("--knn-key", key, "--knn-layer", str(number), "--knn-key-dtype", "float32")
                keys, _ = load(Datastore(dump("valid", *flags)))
                np.testing.assert_allclose(keys[:30], state[:30, 0].numpy(), atol=2e-5, err_msg=f"{key} {number}")


def test_half_precision_model(corpus, adaptive_model, dump, tmp_path):
    """--fp16 runs on the CPU too, and its keys are those of full precision up to rounding."""
    eval_lm_here(corpus, adaptive_model, "--gen-subset", "valid", "--knn-dump", tmp_path / "half", "--fp16")
    half, _ = load(Datastore(tmp_path / "half"))
    full, _ = load(Datastore(dump("valid")))
    np.testing.assert_allclose(half, full, atol=0.05)
    assert (half != full).any()
