#!/bin/sh
# Install this machine's part of the lab, or renew it.
#   --back       return to what the last installation replaced: packages, services and lab.toml
#   --remove     stop and remove it
#   --root DIR   write all files below DIR, and start nothing
# TORCH=cpu|cuda|own chooses the build of PyTorch (locked/install.sh).
set -eu
cd "$(dirname "$0")"
# shellcheck disable=SC1091 # it is part of the kit
. ./kit.env

root="" remove="" back=""
while [ $# -gt 0 ]; do
    case $1 in
    --remove) remove=yes ;;
    --back) back=yes ;;
    --root)
        [ $# -ge 2 ] || { echo "--root needs a folder" >&2; exit 2; }
        root=$2
        shift
        ;;
    *) echo "unknown option $1: use --back, --remove or --root DIR" >&2; exit 2 ;;
    esac
    shift
done
if [ -z "$root" ] && [ "$(id -u)" != 0 ]; then
    echo "not root: use sudo $0" >&2
    exit 2
fi
system=$root/etc/systemd/system

etc=$root/etc/fedstrata
venv=$root$INSTALL/venv
new=$venv-new       # under way
before=$venv-before # what the last installation replaced, with its services in `units`
units=$before/fedstrata-units

remove_others() { # the services of an earlier kit that UNITS lacks
    for path in "$system"/fedstrata-*.service; do
        name=$(basename "$path")
        case " $UNITS " in *" $name "*) continue ;; esac
        [ -e "$path" ] || continue
        [ -n "$root" ] || systemctl disable --now --quiet "$name"
        rm "$path"
        echo "removed $name"
    done
}
keep_services() { # in the environment that is given
    rm -rf "$1/fedstrata-units"
    mkdir -p "$1/fedstrata-units"
    for path in "$system"/fedstrata-*.service "$etc/lab.toml"; do
        [ ! -e "$path" ] || cp -p "$path" "$1/fedstrata-units/"
    done
}
start_services() {
    [ -z "$root" ] || return 0
    systemctl daemon-reload
    for name in $UNITS; do
        systemctl enable --quiet "$name"
        systemctl restart --no-block "$name"
    done
}

if [ -n "$remove" ]; then
    UNITS=""
    remove_others
    rm -rf "$venv" "$new" "$before"
    rm -f "$etc/lab.toml" "$root/usr/local/bin/fedstrata"
    rm -rf "$etc/tls"
    [ -n "$root" ] || systemctl daemon-reload
    exit 0
fi
# An installation that ended between two moves
[ -d "$venv" ] || [ ! -d "$before" ] || mv "$before" "$venv"
if [ -n "$back" ]; then
    [ -d "$units" ] || { echo "nothing to return to: $before is no earlier installation" >&2; exit 1; }
    rm -rf "$new"
    UNITS=""
    for path in "$units"/fedstrata-*.service; do
        [ ! -e "$path" ] || UNITS="$UNITS $(basename "$path")"
    done
    keep_services "$venv" # --back again undoes it
    remove_others
    for name in $UNITS; do
        install -m 644 "$units/$name" "$system/"
        echo "returned to $name"
    done
    [ ! -e "$units/lab.toml" ] || install -m 644 "$units/lab.toml" "$etc/lab.toml"
    mv "$venv" "$new"
    mv "$before" "$venv"
    mv "$new" "$before"
    start_services
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

# Beside what runs, which stays as it is if a step fails. Links take no space; pip replaces files,
# and writes into none.
export PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1
rm -rf "$new"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
cp -al "$venv" "$new" 2>/dev/null || { rm -rf "$new"; cp -a "$venv" "$new"; }
# shellcheck disable=SC2086 # several sets
sh locked/install.sh "$new/bin/python" base $EXTRAS
"$new/bin/python" -m pip install --force-reinstall --no-deps "./$WHEEL" # of the same version it may be a newer one
"$new/bin/fedstrata" --help >/dev/null # it starts on this machine
for path in "$new/bin"/*; do
    [ -L "$path" ] || sed -i "1s|^#!$new/|#!$venv/|" "$path"
done
rm -rf "$before"
if [ -e "$venv/bin/fedstrata" ]; then
    keep_services "$venv"
    mv "$venv" "$before"
else
    rm -rf "$venv"
fi
mv "$new" "$venv"

remove_others
install -D -m 644 lab.toml "$etc/lab.toml"
rm -rf "$etc/tls"
if [ -d tls ]; then
    install -d -m 750 "$etc/tls"
    install -m 640 tls/* "$etc/tls/"
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
start_services
