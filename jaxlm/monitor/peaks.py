"""What a device could do at most, in floating-point operations a second."""

_TPU = "cloud.google.com/tpu/docs, system architecture of each generation"
_H = "NVIDIA H100 and H200 datasheets"

# Dense bf16 (fp16 where a chip has no bf16), by the exact `device_kind` that JAX reports. A slice of a chip (MIG) has
# another name and so no entry. NVIDIA's datasheets quote twice these numbers, with sparsity.
PEAK_FLOPS: dict[str, tuple[float, str]] = {
    "TPU v2": (22.5e12, f"{_TPU}; a device is half a chip"),
    "TPU v3": (61.5e12, f"{_TPU}; a device is half a chip"),
    "TPU v4": (275e12, _TPU),
    "TPU v5 lite": (197e12, _TPU),
    "TPU v5": (459e12, _TPU),
    "TPU v5p": (459e12, _TPU),
    "TPU v6 lite": (918e12, _TPU),
    "NVIDIA B200": (2250e12, "NVIDIA DGX B200 datasheet"),
    "NVIDIA H200": (989.4e12, _H),
    "NVIDIA H200 NVL": (835.5e12, _H),
    "NVIDIA H100 80GB HBM3": (989.4e12, _H),
    "NVIDIA H100 PCIe": (756e12, _H),
    "NVIDIA H100 NVL": (835.5e12, _H),
    "NVIDIA GH200 480GB": (989.4e12, "NVIDIA GH200 datasheet"),
    "NVIDIA A100-SXM4-40GB": (312e12, "NVIDIA A100 datasheet"),
    "NVIDIA A100-SXM4-80GB": (312e12, "NVIDIA A100 datasheet"),
    "NVIDIA A100-PCIE-40GB": (312e12, "NVIDIA A100 datasheet"),
    "NVIDIA A100 80GB PCIe": (312e12, "NVIDIA A100 datasheet"),
    "NVIDIA L40S": (362e12, "NVIDIA L40S datasheet"),
    "NVIDIA L4": (121e12, "NVIDIA L4 datasheet"),
    "Tesla V100-SXM2-16GB": (125e12, "NVIDIA V100 datasheet"),
    "Tesla V100-SXM2-32GB": (125e12, "NVIDIA V100 datasheet"),
    "Tesla T4": (65e12, "NVIDIA T4 datasheet"),
}


def peak_flops(device_kind: str, devices: int = 1) -> float | None:
    """The peak of so many devices; None where it is unknown, which a CPU's always is."""
    known = PEAK_FLOPS.get(device_kind)
    return None if known is None else known[0] * devices
