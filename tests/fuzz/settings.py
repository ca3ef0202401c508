"""What torch, Python and the package have set in this thread: none of it may change by what is interrupted."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from marquardt import deferred
from marquardt.curvature import matrix_free
from marquardt.model import batch as kernels

SHARED = ("PLAIN_ATTENTION", "PLAIN_RECURRENCE", "OPEN_CELLS", "UNCOMPILED")


def settings() -> dict[str, Any]:
    torch.autocast_increment_nesting()
    try:
        torch._C._enter_dual_level()
        torch._C._exit_dual_level(level=0)
        inside = False
    except RuntimeError:  # there is one level at most
        inside = True
    legacy = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    backends = torch.backends
    return {
        "function modes": [id(mode) for mode in _get_current_function_mode_stack()],
        "dispatch modes": [id(mode) for mode in _get_current_dispatch_mode_stack()],
        "functorch levels": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "legacy levels": legacy,
        "forward levels": [inside, forward_ad._current_level],
        "grad mode": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), forward_ad._is_fwd_grad_enabled()],
        "anomalies": torch.is_anomaly_enabled(),
        "autocast": [torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))],
        "cache of autocast": [torch.is_autocast_cache_enabled(), torch.autocast_decrement_nesting()],
        "dtype": str(torch.get_default_dtype()),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "hooks that are refused": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "warnings": [id(warnings.filters), *map(repr, warnings.filters)],
        "showing of warnings": [id(warnings.showwarning), id(getattr(warnings, "_showwarnmsg_impl", None))],
        "backends": [backends.mkldnn.enabled, backends.cudnn.enabled, backends.cuda.math_sdp_enabled(),
                     backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()],
        "threads": torch.get_num_threads(),
        "tape": deferred.current.tape is None,
        "agreement": deferred.current.agree is None,
        "locks": [not matrix_free.LEVEL._is_owned(), *(not getattr(kernels, name).lock.locked() for name in SHARED)],
    }  # fmt: skip


def collected() -> None:
    """What an interrupt has left to the garbage collector is done now, not amid what follows."""
    gc.collect()
    gc.freeze()  # or every attack would go through all that torch has imported
