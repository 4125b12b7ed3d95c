"""Warnings that are only logged reach the user, once."""

from __future__ import annotations

import logging

import pytest

from launch.notices import warnings_shown


def test_warnings_of_every_layer_are_told_and_others_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told: list[str] = []
    with warnings_shown(told.append):
        logging.getLogger("offload.nvme.opening").warning("%s: discarded", "p")
        logging.getLogger("launch.report").error("set aside")
        logging.getLogger("moe.trainer").info("detail")
        logging.getLogger("elsewhere").info("detail")
    assert told == ["warning: p: discarded", "error: set aside"]
    assert capsys.readouterr().err == ""
    logging.getLogger("offload").warning("after")
    assert len(told) == 2
