#!/bin/sh
# Install packages of PyTorch's into .venv, unless they work there already: install-pytorch.sh cpu|cuda PACKAGE...
# The CPU build (0.2 GB) comes from its own index; PyPI's for Linux on x86-64 brings CUDA (5 GB). All packages come from
# one place: torchvision of one build beside torch of the other has no operators.
set -eu
build=$1
shift
index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
python=.venv/bin/python
"$python" -c 'import sys; [*map(__import__, sys.argv[1:])]' "$@" 2>/dev/null && exit 0

case $build in
    cuda)
        echo "==> PyTorch: the build with CUDA, some 5 GB, as there is an NVIDIA driver or TORCH=cuda"
        exec "$python" -m pip install --upgrade "$@"
        ;;
    cpu) echo "==> PyTorch: the CPU build, some 200 MB, as there is no NVIDIA driver or TORCH=cpu; TORCH=cuda is the other" ;;
    *)
        echo "TORCH = '$build': use cpu or cuda" >&2
        exit 2
        ;;
esac
env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null \
    "$python" -m pip install --retries 0 --timeout 20 --index-url "$index" "$@" 2>/dev/null && exit 0

known=""
for package in "$@"; do # a CPU build that pip finds elsewhere
    version=$("$python" -m pip index versions "$package" 2>/dev/null | tr -s ' ,' '\n' | grep -m 1 '+cpu$') || {
        known=""
        break
    }
    known="$known $package==$version"
done
echo "==> $index cannot be reached: PyTorch as pip finds it elsewhere,${known:- with CUDA, some 5 GB}"
# shellcheck disable=SC2086 # several words
exec "$python" -m pip install --upgrade ${known:-"$@"}
