"""Which parameters' rows come from a layer rule, which from the graph, and which from the general path.

That the rows are right is shown for every case of support/cases by jacobian/test_linearization.py.
"""

from __future__ import annotations

import pytest

import marquardt as mq
from support import reference
from support.cases import CONVOLUTIONS, build
from support.linearized import linearize

ALL_BY_RULE = [
    *[
        "mlp_elu",
        "mlp_flat_output",
        "linear_leading_dims",
        "linear_no_bias",
        "ce",
        "frozen_parameters",
        "chosen_parameters",
    ],
    *[name for name in CONVOLUTIONS if "transpose" not in name],
    *["residual_block_in_place", "conv_batchnorm_classifier", "embedding", "embedding_padding"],
    *["layer_norm", "layer_norm_leading_dims", "layer_norm_many_dims", "group_norm", "batch_norm_1d", "batch_norm_2d"],
]
NOT_BY_RULE = {  # the parameters that no rule may claim
    "custom_scale": ["scale", "gain"],
    "custom_polynomial": ["coefficients"],
    "weight_used_transposed": ["encoder.weight"],
    "bilinear_and_prelu": ["pair.weight", "act.weight"],
    "conv_transpose2d": ["0.weight"],
    "weight_norm": ["0.parametrizations.weight.original0", "0.parametrizations.weight.original1"],
    "spectral_norm": ["0.parametrizations.weight.original"],
    "orthogonal": ["0.parametrizations.weight.original"],
    "pinn": ["u.0.weight", "u.0.bias", "u.2.weight"],
    "pinn_two_inputs": ["u.0.weight", "u.0.bias", "u.2.weight", "u.2.bias", "u.4.weight", "kappa"],
    "lstm": ["cell.weight_ih_l0", "cell.weight_hh_l0", "cell.bias_ih_l0", "cell.bias_hh_l0"],
    "gru_time_major": ["cell.weight_ih_l0", "cell.weight_hh_l0", "cell.bias_ih_l0", "cell.bias_hh_l0"],
}


RECURRENT = {"cell": {"graph"}, "head": {"rule"}}
BY_PART = {
    "transformer_encoder_layer": {layer: {"rule"} for layer in ("linear1", "linear2", "norm1", "norm2")},
    "lstm": RECURRENT,  # the graph shows the cells of a recurrent layer; its head keeps its rule
    "gru_time_major": RECURRENT,
}


@pytest.mark.parametrize("name", [*ALL_BY_RULE, *(NOT_BY_RULE | BY_PART)])
def test_paths(name):
    p = build(name)
    lin = linearize(p)
    mq.Dense().represent(lin)
    paths = lin.paths
    assert list(paths) == list(reference.trainable(p.model, p.params))
    assert set(paths.values()) <= {"rule", "none", "graph", "vmap", "parts", "rows", "loop"}
    assert name not in ALL_BY_RULE or set(paths.values()) == {"rule"}
    assert [k for k in NOT_BY_RULE.get(name, []) if paths[k] == "rule"] == []
    for part, ways in BY_PART.get(name, {}).items():
        assert {way for k, way in paths.items() if k.startswith(f"{part}.")} == ways


@pytest.mark.parametrize("name", ALL_BY_RULE)
def test_how_large_a_is_is_known_before_it_is_formed(name):
    """What memory is planned by: as many numbers as a has, groups, strides and kernels of every kind included."""
    for call in linearize(build(name)).whole().whole.watch.calls:
        if call.operand.weight is not None:
            assert call.inputs == call.operand.a().numel()
