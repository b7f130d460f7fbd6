"""A near match for what does not exist."""

import argparse

import pytest

from fairseq_knnlm.near_matches import Parser, did_you_mean, teach_fairseq_near_matches, with_near_matches


def parser_with(*flags: str, kind: type = Parser) -> argparse.ArgumentParser:
    parser = kind(prog="x", allow_abbrev=False)
    for flag in flags:
        parser.add_argument(flag)
    return parser


def test_did_you_mean():
    assert did_you_mean("--knn-datastor", ["--knn-dump", "--knn-datastore"]) == "; did you mean --knn-datastore?"
    assert did_you_mean("--zzz", ["--knn-dump"]) == ""


def test_unknown_flags_and_choices():
    parser = parser_with("--json", "--output")
    message = with_near_matches("unrecognized arguments: --jsn --ouput=x 5", parser)
    assert message.endswith("5; did you mean --json?; did you mean --output?")
    choice = "argument C: invalid choice: 'innfo' (choose from 'build', 'info')"
    assert with_near_matches(choice, parser) == f"{choice}; did you mean info?"
    assert with_near_matches("anything else", parser) == "anything else"


def test_our_parser_asks(capsys):
    with pytest.raises(SystemExit) as error:
        parser_with("--json").parse_args(["--jsn", "1"])
    assert error.value.code == 2 and "did you mean --json?" in capsys.readouterr().err


def test_fairseq_parsers_learn_it(capsys, monkeypatch):
    """Every flag that begins with --knn; nothing else changes."""
    monkeypatch.setattr(argparse.ArgumentParser, "error", argparse.ArgumentParser.error)  # restored afterwards
    teach_fairseq_near_matches(["--knn-k", "--knn-dump"])
    theirs = parser_with("--knn-k", "--path", kind=argparse.ArgumentParser)
    for arguments, expected in (
        (["--knn-kk", "3"], "unrecognized arguments: --knn-kk 3; did you mean --knn-k?"),
        (["--knn-dump", "d"], "d; --knn-dump is a flag of --task knn_language_modeling; add that"),
        (["--pat", "3"], "unrecognized arguments: --pat 3"),
    ):
        with pytest.raises(SystemExit):
            theirs.parse_args(arguments)
        assert capsys.readouterr().err.rstrip().endswith(expected)
