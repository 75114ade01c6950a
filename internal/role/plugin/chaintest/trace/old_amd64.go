package trace

import "golang.org/x/sys/unix"

// pathsOfOld is paths for calls that only old architectures have.
func pathsOfOld(number uint64) []int {
	switch number {
	case unix.SYS_OPEN, unix.SYS_CREAT, unix.SYS_STAT, unix.SYS_LSTAT, unix.SYS_ACCESS, unix.SYS_READLINK, unix.SYS_UNLINK,
		unix.SYS_MKDIR, unix.SYS_RMDIR, unix.SYS_MKNOD, unix.SYS_CHMOD, unix.SYS_CHOWN, unix.SYS_LCHOWN, unix.SYS_UTIME, unix.SYS_UTIMES:
		return []int{0}
	case unix.SYS_RENAME, unix.SYS_LINK, unix.SYS_SYMLINK:
		return []int{0, 1}
	case unix.SYS_FUTIMESAT:
		return []int{1}
	default:
		return nil
	}
}
