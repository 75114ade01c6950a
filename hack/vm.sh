#!/usr/bin/env bash
# Boots Debian's kernel in qemu without the modules of iptables (nft_compat, x_tables, xt_*, ip_tables, …), as RHEL 10.2 ships
# its own, and shows that the program works there: the self-test chooses native for auto, which then captures by hand, twice,
# with --verify in between. A first boot with all modules shows that the test sees the difference.
#
#   hack/vm.sh
#
# The kernel package is downloaded and unpacked into bin/vm, not installed. qemu emulates the processor: no KVM is needed.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
hack/setup.sh vm
use_go

dir=$root/bin/vm
mkdir -p "$dir"
stamp vm
compile "$dir/istio-cni" linux amd64 .

if ! compgen -G "$dir/kernel/boot/vmlinuz-*" >/dev/null; then
  package=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: //p' | head -n 1)
  (cd "$dir" && apt-get -o APT::Sandbox::User=root -qq download "$package")
  dpkg-deb -x "$dir/$package"_*.deb "$dir/kernel"
fi
kernel=$(compgen -G "$dir/kernel/boot/vmlinuz-*" | head -n 1)
version=${kernel##*/vmlinuz-}

# script is what process 1 of the machine runs. The address is on lo, because the machine has no other interface.
script() {
  cat <<'EOF'
#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs run /run
mkdir -p /var/run
exec 2>&1
ip link set lo up
ip addr add 10.9.9.9/32 dev lo
step() {
  name=$1
  shift
  "$@"
  echo "STEP $name: $?"
}
step selftest istio-cni selftest
step before istio-cni iptables --verify
step apply istio-cni iptables
step verify istio-cni iptables --verify
step again istio-cni iptables
step clean istio-cni iptables --cleanup-only
step after istio-cni iptables --verify
poweroff -f
EOF
}

# boot NAME PATTERN boots the kernel without the modules that match, and prints the machine's console.
boot() {
  local tree=$dir/$1 modules
  modules=$tree/lib/modules/$version
  rm -rf "$tree"
  mkdir -p "$tree"/{bin,sbin,proc,sys,run,etc,tmp} "$modules/kernel"
  cp /bin/busybox "$tree/bin"
  for applet in sh mount mkdir ip poweroff echo; do ln -s busybox "$tree/bin/$applet"; done
  ln -s ../bin/busybox "$tree/sbin/modprobe"
  ln -s ../bin/busybox "$tree/sbin/poweroff"
  cp "$dir/istio-cni" "$tree/bin"
  (cd "$dir/kernel/lib/modules/$version" && cp modules.builtin modules.builtin.modinfo modules.order "$modules" &&
    cp -r --parents kernel/net kernel/crypto kernel/arch/x86/crypto kernel/drivers/net/veth.ko kernel/lib "$modules")
  find "$modules" -name '*.ko' | { grep -E "$2" || true; } | xargs -r rm -f
  depmod -b "$tree" "$version"
  script >"$tree/init"
  chmod +x "$tree/init"
  (cd "$tree" && find . | cpio --quiet -o -H newc | gzip -1) >"$tree.initrd"
  timeout 600 qemu-system-x86_64 -accel tcg -cpu max -m 1024 -nographic -no-reboot -nodefaults -serial stdio \
    -kernel "$kernel" -initrd "$tree.initrd" -append "console=ttyS0 quiet panic=-1" </dev/null | tr -d '\r' | tee "$tree.log"
}

# has LOG LINE... fails if the console lacks a line.
has() {
  local log=$1 line
  shift
  for line in "$@"; do
    grep -qxF -- "$line" "$log" || die "the console has no line $line: $log"
  done
}

steps=("STEP before: 3" "STEP apply: 0" "STEP verify: 0" "STEP again: 0" "STEP clean: 0" "STEP after: 3" "STEP selftest: 0")
say "== all modules"
boot all '^$'
has "$dir/all.log" "backend auto is netlink" "done with netlink" "${steps[@]}"
say "== no module of iptables"
boot native '/(nft_compat|x_tables|ip6?_tables|(xt|ipt|ip6t|ip6?table)_[A-Za-z0-9_]*|arp_tables|arptable_filter|ebtable.*)\.ko$'
has "$dir/native.log" "backend auto is native" "done with native" "the namespace is up to date (native)" "${steps[@]}"
say "vm: passed"
