"""Which failure is which: the texts and codes are those that TensorRT and CUDA were seen to give."""

from __future__ import annotations

import pytest
from trtmodel_worker.engines.base import CannotLoad, DeviceLost, InvalidInput, OutOfMemory, Recoverable, Sticky
from trtmodel_worker.engines.tensorrt.errors import Evidence, classify

UNSPECIFIED, INTERNAL, ARGUMENT = "UNSPECIFIED_ERROR", "INTERNAL_ERROR", "INVALID_ARGUMENT"
ILLEGAL = "Error Code 1: Cuda Runtime (an illegal memory access was encountered)"
CUTENSOR = "Error Code 1: CuTensor (Internal cuTensor permutate execute failed)"
NO_MEMORY = "[defaultAllocator.cpp::allocate::20] Error Code 1: Cuda Runtime (out of memory)"
NO_CONTEXT = "[executionContext.cpp::409] Error Code 2: OutOfMemory (no further information)"
NO_SCRATCH = "virtualMemoryBuffer.cpp::resizePhysical::127] Error Code 2: OutOfMemory (no further information)"
NO_PROFILE = (
    "setInputShape: Error Code 3: API Usage Error (Parameter check failed, condition: engineDims.d[i] == dims.d[i]. "
    "Runtime dimension does not satisfy any optimization profile"
)
NO_FIT = (
    "[shapeMachine.cpp::executeContinuation::864] Error Code 7: Internal Error (sum: dimensions not compatible for "
    "elementwise. Broadcast has incompatible dimensions: 2 != 3 && 2 != 1 && 3 != 1. Instruction: CHECK_BROADCAST 2 3.)"
)
NO_RESHAPE = (
    "[shapeMachine.cpp::executeContinuation::905] Error Code 7: Internal Error (reshape: reshape would change volume. "
    "Instruction: RESHAPE_ZERO_IS_PLACEHOLDER {2 8} {3 -1}.)"
)
NO_ADDRESS = "Error Code 3: API Usage Error (Parameter check failed. Address is not set for input tensor x)"
OTHER_VERSION = (
    "Error Code 1: Serialization (Serialization assertion stdVersionRead == serializationVersion failed. Version tag "
    "does not match. Note: Current Version: 236, Serialized Engine Version: 228)"
)
OTHER_DEVICE = "generated on an incompatible device, expecting compute 8.6 got compute 7.5, please rebuild"


def told(*reported, **more):
    """TensorRT's reports, as pairs of code and text."""
    return Evidence("it failed", reported=reported, **more)


SEEN = [
    # memory: as code 1, as code 2, by CUDA's status
    (OutOfMemory, told((UNSPECIFIED, NO_MEMORY), (INTERNAL, NO_CONTEXT))),
    (OutOfMemory, told((INTERNAL, NO_SCRATCH))),
    (OutOfMemory, told(("FAILED_ALLOCATION", "no"))),
    (OutOfMemory, told(cuda=2)),
    (OutOfMemory, told(cuda=2, loading=True)),
    (OutOfMemory, told(probe=2, probes_failed=2)),
    # the process has lost the device: by the call's status, or by the probe although the call said nothing
    (Sticky, told(cuda=700)),
    (Sticky, told((UNSPECIFIED, CUTENSOR), (UNSPECIFIED, ILLEGAL), probe=700)),
    (Sticky, told((UNSPECIFIED, "Error Code 1: Myelin (... Platform (Cuda) error)"), cuda=700)),
    (Sticky, told(cuda=719)),
    (Sticky, told(cuda=810)),
    (Sticky, told(cuda=709)),
    (Sticky, told(cuda=999)),
    (Sticky, told(probe=400, probes_failed=2)),
    (Sticky, told((UNSPECIFIED, ILLEGAL), probe=400, probes_failed=1)),
    (Sticky, told((INTERNAL, "Assertion failed"), repeated=True)),
    # the device is gone
    (DeviceLost, told(cuda=214)),
    (DeviceLost, told(probe=220)),
    (DeviceLost, told(cuda=100)),
    (DeviceLost, told(cuda=35, loading=True)),
    (DeviceLost, told(cuda=2, probe=214)),
    (DeviceLost, told(probe=46, loading=True)),
    # another lane, or this one made anew
    (Recoverable, told((UNSPECIFIED, ILLEGAL))),  # a text beside a device that works
    (Recoverable, told(probe=400, probes_failed=1)),
    (Recoverable, told((ARGUMENT, NO_ADDRESS))),
    (Recoverable, told((UNSPECIFIED, "Error Code 1: Cuda Runtime (invalid resource handle)"))),
    (Recoverable, told((UNSPECIFIED, "Error Code 1: Cask (Cask convolution execution)"))),
    (Recoverable, told(("FAILED_EXECUTION", "x"))),
    (Recoverable, told((INTERNAL, "Assertion failed"))),
    (Recoverable, told(cuda=701)),
    (Recoverable, told()),
    # the request, and the plan
    (InvalidInput, told((ARGUMENT, NO_PROFILE))),
    (InvalidInput, told(("FAILED_EXECUTION", NO_FIT), inputs=2)),
    (InvalidInput, told((INTERNAL, NO_FIT), inputs=2, repeated=True)),
    (Recoverable, told(("FAILED_EXECUTION", NO_FIT))),  # of one input: the engine's own shapes do not fit
    (Recoverable, told(("FAILED_EXECUTION", NO_RESHAPE), inputs=2)),
    (CannotLoad, told(("FAILED_EXECUTION", OTHER_VERSION), loading=True)),
    (CannotLoad, told(("INVALID_CONFIG", OTHER_DEVICE), loading=True)),
    (CannotLoad, told(cuda=209)),
    (CannotLoad, told(loading=True)),
]


@pytest.mark.parametrize(("expected", "seen"), SEEN)
def test_what_tensorrt_and_cuda_say_is_the_class_that_decides_what_happens_next(expected, seen):
    assert type(classify(seen)) is expected


def test_the_text_of_a_failure_holds_everything_that_was_said():
    seen = Evidence("enqueue failed", reported=((UNSPECIFIED, "Error Code 1: Cask"),), cuda=701,
                    cuda_text="cudaGraphLaunch: cudaErrorLaunchOutOfResources (701)", probe=400)  # fmt: skip
    text = str(classify(seen))
    for part in ("enqueue failed", "Error Code 1: Cask [UNSPECIFIED_ERROR]", "cudaGraphLaunch", "CUDA error 400"):
        assert part in text
