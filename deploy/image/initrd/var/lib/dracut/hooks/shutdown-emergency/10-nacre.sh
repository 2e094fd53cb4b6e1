# An initrd that does not find its disks: restarts as long as that can help, and does not return.
/usr/lib/nacre/restart not-started >/dev/console 2>&1
