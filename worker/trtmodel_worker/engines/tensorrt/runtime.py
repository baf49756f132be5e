"""TensorRT as a Runtime of the Engine protocol. Asking what this machine is does not load TensorRT."""

from __future__ import annotations

from trtmodel_contract.identity import LoadKey, Profile

from trtmodel_worker.engines.base import CannotLoad, DeviceLost, Engine
from trtmodel_worker.engines.tensorrt import compat
from trtmodel_worker.engines.tensorrt.device import Cuda, CudaError, NoCuda


class TensorRtRuntime:
    NAME = "TensorRT"

    def load_key(self) -> LoadKey:
        """Raises DeviceLost without a device, CannotLoad without TensorRT."""
        cuda = _device()
        try:
            version = compat.installed_version()
        except compat.NotInstalled as e:
            raise CannotLoad(str(e)) from e
        device = cuda.identity()
        return LoadKey(self.NAME, version, device.name, device.capability, device.mig)

    def driver(self) -> str:
        return _device().driver()

    def load(self, plan: memoryview, profiles: tuple[Profile, ...], lanes: int) -> Engine:
        """Raises EngineError. A driver or device that is not there is the node's fault, not the plan's."""
        cuda = _device()  # first: without a driver, `trt.Runtime` of 8.6.0 ends the process by a segmentation fault
        from trtmodel_worker.engines.tensorrt.run import load

        return load(plan, profiles, lanes, cuda)


def _device() -> Cuda:
    try:
        cuda = Cuda()
        count = cuda.count()
    except NoCuda as e:
        raise CannotLoad(str(e)) from e
    except CudaError as e:
        raise DeviceLost(f"{e}: is this a node with a GPU, and did the pod ask for one (nvidia.com/gpu)?") from e
    if count < 1:
        raise DeviceLost("CUDA sees no device: did the pod ask for one (nvidia.com/gpu)?")
    return cuda
