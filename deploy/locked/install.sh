#!/bin/sh
# Install exact versions of packages, each checked by its hash: install.sh PYTHON SET...
# A set is a file beside this one: base, build, learning, embedded, report, methods, docs, dev. `learning` brings
# PyTorch, of the build that TORCH names:
#   cpu    that of PyTorch's own index (0.2 GB), else PyPI's; the default without an NVIDIA driver. TORCH_CPU_INDEX may
#          name a copy of the index. On aarch64 PyPI's last one without CUDA (150 MB)
#   cuda   PyPI's (5 GB with CUDA on Linux); the default with an NVIDIA driver
#   own    the one that PYTHON has already, of any version: a board's own build
# Nothing is fetched that PYTHON has. Only wheels are installed, as nothing checks what a source archive needs to build.
set -eu
[ $# -ge 2 ] || { echo "usage: install.sh PYTHON SET..." >&2; exit 2; }
python=$1
shift
locked=$(dirname "$0")
[ -e /proc/driver/nvidia/version ] && build=cuda || build=cpu
build=${TORCH:-$build}
case $build in cpu | cuda | own) ;; *) echo "TORCH = '$build': use cpu, cuda or own" >&2; exit 2 ;; esac

learning=""
for name in "$@"; do # they become the options of pip
    shift
    [ -e "$locked/$name.txt" ] || { echo "no set $name in $locked" >&2; exit 2; }
    [ "$name" = learning ] && learning=yes
    set -- "$@" -r "$locked/$name.txt"
done
install() {
    "$python" -m pip install --only-binary :all: "$@"
}

if [ -z "$learning" ] || [ "$build" = own ]; then
    install --require-hashes "$@"
elif [ "$build" = cuda ]; then
    echo "==> PyTorch: the build with CUDA, some 5 GB, as there is an NVIDIA driver or TORCH=cuda"
    install --require-hashes "$@" -r "$locked/torch.txt"
elif [ "$(uname -m)" = aarch64 ]; then
    echo "==> PyTorch: the CPU build, some 150 MB, as there is no NVIDIA driver or TORCH=cpu; TORCH=cuda is the other"
    install --require-hashes "$@" -r "$locked/torch-aarch64.txt"
else
    echo "==> PyTorch: the CPU build, some 200 MB, as there is no NVIDIA driver or TORCH=cpu; TORCH=cuda is the other"
    install --require-hashes "$@"
    index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
    # pip checks hashes where the file has them. Both packages come from one index, and nothing else does.
    env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null "$python" -m pip install --no-deps \
        --only-binary :all: --retries 0 --timeout 20 --index-url "$index" -r "$locked/torch-cpu.txt" || {
        echo "==> not from $index: PyTorch as PyPI has it, with CUDA some 5 GB"
        install --require-hashes "$@" -r "$locked/torch.txt"
    }
fi
if [ -n "$learning" ] && ! "$python" -c 'import torchvision'; then
    echo "PyTorch does not work with $python. If torch and torchvision are of two builds, uninstall both, and repeat" >&2
    exit 1
fi
