"""Opens files in an inbox without following links. Otherwise whoever delivers images
could at any moment put a link on the way, to a folder that only the daemon may read. And gives a file a name that is free."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# A link is refused rather than followed, and a FIFO that took a file's place does not block us.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC  # the inbox itself: it may be a link
OPENAT2, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 437, 0x04, 0x08
_HOW = struct.pack("QQQ", READ, 0, RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH)  # struct open_how
_libc = ctypes.CDLL(None, use_errno=True)
_RENAMEAT2 = getattr(_libc, "renameat2", None)  # of the C library, since glibc 2.28
HERE, NO_REPLACE = -100, 0x01  # fcntl.h, linux/fs.h
# The call is missing, or a container's filter or the file system refuses it, as NFS does.
_NO_SUCH_CALL = (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.ENOTSUP)


def open_beneath(root: bytes, path: bytes) -> int:
    """A descriptor, for reading, of the file `path` in the inbox `root`. Raises OSError, also for a link."""
    folder = os.open(root, FOLDER)
    try:
        fd: int = _libc.syscall(OPENAT2, folder, path, _HOW, len(_HOW))
        if fd < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
            # openat2 is missing before Linux 5.6, or a container's filter refuses it.
            return os.open(path, READ, dir_fd=folder)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        return fd
    finally:
        os.close(folder)


def rename_to_free(old: bytes, new: bytes, *, src_dir_fd: int = HERE, dst_dir_fd: int = HERE) -> None:
    """Rename a file, and replace none that has got the new name by now. Raises FileExistsError then, OSError. Where the system
    cannot do that, one that gets the name at that very moment is replaced."""
    if _RENAMEAT2 and not _RENAMEAT2(src_dir_fd, old, dst_dir_fd, new, NO_REPLACE):
        return
    number = ctypes.get_errno() if _RENAMEAT2 else errno.ENOSYS
    if number not in _NO_SUCH_CALL:
        raise OSError(number, os.strerror(number), old, None, new)
    try:
        os.stat(new, dir_fd=dst_dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    else:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), old, None, new)
