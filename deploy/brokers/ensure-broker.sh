#!/bin/sh
# Install mosquitto if that needs no password; otherwise print that the embedded broker will be used. Never fails.
[ "${FEDSTRATA_BROKER_KIND:-}" = embedded ] && exit 0
PATH="$PATH:/usr/sbin:/usr/local/sbin"
command -v mosquitto >/dev/null && exit 0

without() {
    echo "mosquitto is not installed ($1): the embedded broker is used. For measurements: apt install mosquitto" >&2
    exit 0
}

command -v apt-get >/dev/null || without "no apt-get"
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    without "not root, and sudo asks for a password"
fi

install() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60 \
        install --no-install-recommends -y mosquitto >/dev/null 2>&1
}

# Debian starts installed services. Keep port 1883 free: each run starts its own broker.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap '$as_root rm -f $policy' EXIT
    trap 'exit 0' INT TERM
    printf '#!/bin/sh\nexit 101\n' | $as_root tee $policy >/dev/null && $as_root chmod 755 $policy
fi
echo "installing mosquitto with apt-get" >&2
install || { $as_root apt-get -qq update >/dev/null 2>&1; install; } || without "apt-get failed"
[ -d /run/systemd/system ] && $as_root systemctl disable --now --quiet mosquitto >/dev/null 2>&1
exit 0
