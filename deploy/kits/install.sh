#!/bin/sh
# Install this machine's part of the lab, or renew it.
#   --remove     stop and remove it
#   --root DIR   write all files below DIR, and start nothing
# TORCH=cpu|cuda|own chooses the build of PyTorch (locked/install.sh).
set -eu
cd "$(dirname "$0")"
# shellcheck disable=SC1091 # it is part of the kit
. ./kit.env

root="" remove=""
while [ $# -gt 0 ]; do
    case $1 in
    --remove) remove=yes ;;
    --root)
        [ $# -ge 2 ] || { echo "--root needs a folder" >&2; exit 2; }
        root=$2
        shift
        ;;
    *) echo "unknown option $1: use --remove or --root DIR" >&2; exit 2 ;;
    esac
    shift
done
if [ -z "$root" ] && [ "$(id -u)" != 0 ]; then
    echo "not root: use sudo $0" >&2
    exit 2
fi
system=$root/etc/systemd/system

[ -z "$remove" ] || UNITS=""
for path in "$system"/fedstrata-*.service; do # of an earlier kit
    name=$(basename "$path")
    case " $UNITS " in *" $name "*) continue ;; esac
    [ -e "$path" ] || continue
    [ -n "$root" ] || systemctl disable --now --quiet "$name"
    rm "$path"
    echo "removed $name"
done
if [ -n "$remove" ]; then
    rm -rf "$root$INSTALL/venv"
    rm -f "$root/etc/fedstrata/lab.toml" "$root/usr/local/bin/fedstrata"
    rm -rf "$root/etc/fedstrata/tls"
    [ -n "$root" ] || systemctl daemon-reload
    exit 0
fi

packages() {
    if command -v apt-get >/dev/null; then
        DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends -y "$@" >/dev/null
    else
        echo "install these packages first: $*" >&2
        exit 1
    fi
}
find_python() {
    for candidate in python3.13 python3.12 python3.11 python3; do
        "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        echo "$candidate"
        return
    done
}
python=$(find_python)
if [ -z "$python" ] && [ -z "$root" ]; then
    packages python3 python3-venv
    python=$(find_python)
fi
[ -n "$python" ] || { echo "Python 3.11 or newer with its venv module is needed" >&2; exit 1; }

venv=$root$INSTALL/venv
export PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# shellcheck disable=SC2086 # several sets
sh locked/install.sh "$venv/bin/python" base $EXTRAS
"$venv/bin/python" -m pip install --force-reinstall --no-deps "./$WHEEL" # of the same version it may be a newer one

install -D -m 644 lab.toml "$root/etc/fedstrata/lab.toml"
rm -rf "$root/etc/fedstrata/tls"
if [ -d tls ]; then
    install -d -m 750 "$root/etc/fedstrata/tls"
    install -m 640 tls/* "$root/etc/fedstrata/tls/"
fi
mkdir -p "$system" "$root/usr/local/bin"
ln -sf "$INSTALL/venv/bin/fedstrata" "$root/usr/local/bin/fedstrata"
for name in $UNITS; do
    install -m 644 "units/$name" "$system/"
    echo "installed $name"
done
[ -z "$root" ] || exit 0

if [ "$MOSQUITTO" = yes ] && ! PATH=$PATH:/usr/sbin command -v mosquitto >/dev/null; then
    packages mosquitto
    systemctl disable --now --quiet mosquitto # the lab's own broker takes its place
fi
getent passwd fedstrata >/dev/null || useradd --system --home-dir /var/lib/fedstrata --shell /usr/sbin/nologin fedstrata
[ ! -d tls ] || chgrp -R fedstrata /etc/fedstrata/tls # who starts runs here joins this group
systemctl daemon-reload
for name in $UNITS; do
    systemctl enable --quiet "$name"
    systemctl restart --no-block "$name"
done
