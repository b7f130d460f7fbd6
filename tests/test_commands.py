"""The helpers of the tests are what they say."""

import pytest
from commands import EVAL_FLAGS, KNN_TASK, SPALM_SCORING, SPALM_TRAINING, XL, config_of
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

import fairseq_knnlm.tasks.knn_language_modeling
import fairseq_knnlm.tasks.spalm  # noqa: F401

KNN = ["--knn-datastore", "a,b", "--knn-lambda", "0.1,0.2", "--knn-k", "all", "--knn-temperature", "5"]


@pytest.mark.parametrize(
    ("parser", "calls"),
    [
        (
            options.get_eval_lm_parser,
            [
                [*EVAL_FLAGS, *KNN_TASK],
                [*EVAL_FLAGS, *KNN_TASK, *KNN, "--knn-metric", "ip", "--knn-nprobe", "4"],
                [*EVAL_FLAGS, *KNN_TASK, "--knn-cache-size", "5", "--knn-cache-boundary", "re:it's = 'w1'.*"],
                [*EVAL_FLAGS, *KNN_TASK, "--knn-index", "IVF64(IVF8,Flat),SQfp16", "--knn-k", "64"],
                [*EVAL_FLAGS, *KNN_TASK, "--knn-dump", "x y", "--knn-layer", "-1", "--fp16", "--add-bos-token"],
                [*EVAL_FLAGS, *KNN_TASK, *SPALM_SCORING, "--model-overrides", "{'memory_size': 0}"],
                [*EVAL_FLAGS, "--gen-subset", "valid", "--num-shards", "3", "--shard-id", "1"],
            ],
        ),
        (
            options.get_interactive_generation_parser,
            [[*KNN_TASK, "--beam", "1"], [*KNN_TASK, *KNN, "--sampling", "--sampling-topp", "0.9", "--seed", "3"]],
        ),
        (
            options.get_training_parser,
            [[*SPALM_TRAINING, *XL], [*SPALM_TRAINING, *XL, "--lr", "0.1,0.2", "--dim", "8"]],
        ),
    ],
)
def test_configs_are_those_of_fairseq(parser, calls):
    """Each call after the first is made from the config of another."""
    for flags in (*calls, calls[0]):
        arguments = list(map(str, ["data", *flags]))
        expected = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser(), arguments))
        ours = config_of(options.parse_args_and_arch(parser(), arguments))
        assert OmegaConf.to_container(ours) == OmegaConf.to_container(expected)
