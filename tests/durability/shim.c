// What a process does to the files below one folder, in order: preloaded into it by recorder.py.
//
// Every call that this library takes the place of is made, under one lock, as a raw system call;
// where it succeeded on a path below RECORD_ROOT a record is appended to RECORD_LOG. Files are told
// apart by inode: a descriptor may be a copy, and its path may have been renamed since. What the
// records cannot express (a write through a mapping, a copy inside the kernel) is recorded by name,
// so that the reader refuses the log.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind {
  CREATE = 1,
  WRITE,
  TRUNCATE,
  SYNC,
  RENAME,
  UNLINK,
  MKDIR,
  RMDIR,
  LINK,
  MARK,
  MAPPED,
  UNSUPPORTED
};

struct header {
  uint32_t kind, path_bytes, target_bytes, reserved;
  uint64_t inode, offset, data_bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_bytes;
static int log_fd = -1;

__attribute__((constructor)) static void start(void) {
  const char* folder = getenv("RECORD_ROOT");
  const char* log = getenv("RECORD_LOG");
  if (!folder || !log || !realpath(folder, root)) return;
  root_bytes = strlen(root);
  int opened = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  // Out of the way of code that counts descriptors or closes the low ones.
  log_fd = fcntl(opened, F_DUPFD_CLOEXEC, 200);
  syscall(SYS_close, opened);
  unsetenv("LD_PRELOAD");
}

static int is_below(const char* path) {
  return log_fd >= 0 && !strncmp(path, root, root_bytes) &&
         (path[root_bytes] == '/' || !path[root_bytes]);
}

static void record(
    enum kind kind, uint64_t inode, uint64_t offset, const char* path, const char* target,
    const void* data, size_t data_bytes) {
  struct header header = {kind, strlen(path), strlen(target), 0, inode, offset, data_bytes};
  struct iovec parts[] = {
      {&header, sizeof header},
      {(void*)path, header.path_bytes},
      {(void*)target, header.target_bytes},
      {(void*)data, data_bytes}};
  size_t wanted = sizeof header + header.path_bytes + header.target_bytes + data_bytes;
  if (syscall(SYS_writev, log_fd, parts, 4) != (long)wanted) abort();
}

// The path of an open descriptor as it is now, below the root; 0: elsewhere, or no path.
static int path_of(int fd, char* path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  path[length < 0 ? 0 : length] = 0;
  return is_below(path);
}

// The path of a name: its folder's real path and the last component. 0: not below the root.
static int path_at(int folder, const char* name, char* path) {
  char parent[PATH_MAX];
  if (log_fd < 0 || !name || strlen(name) >= PATH_MAX) return 0;
  strcpy(parent, name);
  size_t length = strlen(parent);
  while (length > 1 && parent[length - 1] == '/') parent[--length] = 0;
  char* slash = strrchr(parent, '/');
  const char* last = slash ? slash + 1 : parent;
  char base[PATH_MAX];
  strcpy(base, last);
  if (slash) slash[slash == parent] = 0;
  int fd = syscall(SYS_openat, folder, slash ? parent : ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return 0;
  char folder_path[PATH_MAX];
  int below = path_of(fd, folder_path);
  syscall(SYS_close, fd);
  return below && snprintf(path, PATH_MAX, "%s/%s", folder_path, base) < PATH_MAX;
}

static uint64_t inode_at(const char* path) {
  struct stat status;
  return lstat(path, &status) ? 0 : status.st_ino;
}

static uint64_t inode_of(int fd) {
  struct stat status;
  return fstat(fd, &status) ? 0 : status.st_ino;
}

// A call on a path below the root is between these: what is done and what is recorded is in one
// order. All others take no lock: they may wait for each other.
static int begin(int below) {
  if (below) pthread_mutex_lock(&lock);
  return below;
}

static void end(int below) {
  int number = errno;
  if (below) pthread_mutex_unlock(&lock);
  errno = number;
}

static int open_at(int folder, const char* name, int flags, mode_t mode) {
  char path[PATH_MAX];
  int below = begin((flags & (O_CREAT | O_TRUNC)) && path_at(folder, name, path));
  uint64_t before = below ? inode_at(path) : 0;
  int fd = syscall(SYS_openat, folder, name, flags | O_LARGEFILE, mode);
  if (fd >= 0 && below) {
    if ((flags & O_TMPFILE) == O_TMPFILE) record(UNSUPPORTED, 0, 0, path, "O_TMPFILE", "", 0);
    if (!before) record(CREATE, inode_of(fd), 0, path, "", "", 0);
    if (before && (flags & O_TRUNC)) record(TRUNCATE, inode_of(fd), 0, path, "", "", 0);
  }
  end(below);
  return fd;
}

#define OPEN(name)                                  \
  int name(const char* path, int flags, ...) {      \
    va_list more;                                   \
    va_start(more, flags);                          \
    mode_t mode = va_arg(more, int);                \
    va_end(more);                                   \
    return open_at(AT_FDCWD, path, flags, mode);    \
  }
#define OPENAT(name)                                        \
  int name(int folder, const char* path, int flags, ...) {  \
    va_list more;                                           \
    va_start(more, flags);                                  \
    mode_t mode = va_arg(more, int);                        \
    va_end(more);                                           \
    return open_at(folder, path, flags, mode);              \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int __open_2(const char* path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int __open64_2(const char* path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int __openat_2(int folder, const char* path, int flags) { return open_at(folder, path, flags, 0); }
int __openat64_2(int folder, const char* path, int flags) { return open_at(folder, path, flags, 0); }
int creat(const char* path, mode_t mode) {
  return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int creat64(const char* path, mode_t mode) { return creat(path, mode); }

static ssize_t write_at(int fd, const struct iovec* parts, int count, off_t offset) {
  char path[PATH_MAX];
  int below = begin(path_of(fd, path));
  uint64_t start = offset;
  if (below && offset < 0) {
    struct stat status;
    int appends = fcntl(fd, F_GETFL) & O_APPEND;
    start = appends && !fstat(fd, &status) ? status.st_size : lseek(fd, 0, SEEK_CUR);
  }
  ssize_t written = offset < 0 ? syscall(SYS_writev, fd, parts, count)
                               : syscall(SYS_pwritev, fd, parts, count, offset, 0);
  ssize_t left = below ? written : 0;
  for (int part = 0; left > 0; ++part) {
    ssize_t bytes = parts[part].iov_len < (size_t)left ? parts[part].iov_len : (size_t)left;
    record(WRITE, inode_of(fd), start, path, "", parts[part].iov_base, bytes);
    start += bytes;
    left -= bytes;
  }
  end(below);
  return written;
}

ssize_t write(int fd, const void* data, size_t size) {
  return write_at(fd, &(struct iovec){(void*)data, size}, 1, -1);
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  return write_at(fd, &(struct iovec){(void*)data, size}, 1, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off_t offset) {
  return pwrite(fd, data, size, offset);
}
ssize_t writev(int fd, const struct iovec* parts, int count) {
  return write_at(fd, parts, count, -1);
}
ssize_t pwritev(int fd, const struct iovec* parts, int count, off_t offset) {
  return write_at(fd, parts, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec* parts, int count, off_t offset) {
  return write_at(fd, parts, count, offset);
}
// Flags only say how soon: the write is the same.
ssize_t pwritev2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
  (void)flags;
  return write_at(fd, parts, count, offset);
}
ssize_t pwritev64v2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
  return pwritev2(fd, parts, count, offset, flags);
}

int ftruncate(int fd, off_t size) {
  char path[PATH_MAX];
  int below = begin(path_of(fd, path));
  int result = syscall(SYS_ftruncate, fd, size);
  if (!result && below) record(TRUNCATE, inode_of(fd), size, path, "", "", 0);
  end(below);
  return result;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int truncate(const char* name, off_t size) {
  int fd = open_at(AT_FDCWD, name, O_WRONLY | O_CLOEXEC, 0);
  if (fd < 0) return -1;
  int result = ftruncate(fd, size);
  close(fd);
  return result;
}
int truncate64(const char* name, off_t size) { return truncate(name, size); }

int fallocate(int fd, int mode, off_t offset, off_t size) {
  char path[PATH_MAX];
  struct stat status;
  int below = begin(path_of(fd, path));
  int result = syscall(SYS_fallocate, fd, mode, offset, size);
  if (!result && below) {
    if (mode) record(UNSUPPORTED, 0, 0, path, "fallocate", "", 0);
    if (!fstat(fd, &status)) record(TRUNCATE, inode_of(fd), status.st_size, path, "", "", 0);
  }
  end(below);
  return result;
}
int fallocate64(int fd, int mode, off_t offset, off_t size) {
  return fallocate(fd, mode, offset, size);
}
int posix_fallocate(int fd, off_t offset, off_t size) {
  return fallocate(fd, 0, offset, size) ? errno : 0;
}
int posix_fallocate64(int fd, off_t offset, off_t size) {
  return posix_fallocate(fd, offset, size);
}

static int sync_fd(int fd, long number) {
  char path[PATH_MAX];
  int below = begin(path_of(fd, path));
  int result = syscall(number, fd);
  if (!result && below) record(SYNC, inode_of(fd), 0, path, "", "", 0);
  end(below);
  return result;
}
int fsync(int fd) { return sync_fd(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_fd(fd, SYS_fdatasync); }

static int rename_at(int from, const char* old, int to, const char* new, unsigned flags) {
  char source[PATH_MAX], target[PATH_MAX];
  int below = path_at(from, old, source), enters = path_at(to, new, target);
  begin(below || enters);
  uint64_t inode = below ? inode_at(source) : 0;
  int result = syscall(SYS_renameat2, from, old, to, new, flags);
  if (!result && (below || enters)) {
    int plain = below && enters && !(flags & ~1u);  // RENAME_NOREPLACE.
    record(plain ? RENAME : UNSUPPORTED, inode, 0, below ? source : target,
           plain ? target : "rename", "", 0);
  }
  end(below || enters);
  return result;
}
int rename(const char* old, const char* new) {
  return rename_at(AT_FDCWD, old, AT_FDCWD, new, 0);
}
int renameat(int from, const char* old, int to, const char* new) {
  return rename_at(from, old, to, new, 0);
}
int renameat2(int from, const char* old, int to, const char* new, unsigned flags) {
  return rename_at(from, old, to, new, flags);
}

int linkat(int from, const char* old, int to, const char* new, int flags) {
  char target[PATH_MAX];
  int below = begin(path_at(to, new, target));
  int result = syscall(SYS_linkat, from, old, to, new, flags);
  if (!result && below) record(LINK, inode_at(target), 0, target, "", "", 0);
  end(below);
  return result;
}
int link(const char* old, const char* new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int folder, const char* name, int flags) {
  char path[PATH_MAX];
  int below = begin(path_at(folder, name, path));
  int result = syscall(SYS_unlinkat, folder, name, flags);
  if (!result && below) record(flags & AT_REMOVEDIR ? RMDIR : UNLINK, 0, 0, path, "", "", 0);
  end(below);
  return result;
}
int unlink(const char* name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char* name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char* name) {
  return unlink(name) && (errno == EISDIR || errno == EPERM) ? rmdir(name) : 0;
}

int mkdirat(int folder, const char* name, mode_t mode) {
  char path[PATH_MAX];
  int below = begin(path_at(folder, name, path));
  int result = syscall(SYS_mkdirat, folder, name, mode);
  if (!result && below) record(MKDIR, inode_at(path), 0, path, "", "", 0);
  end(below);
  return result;
}
int mkdir(const char* name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

void* mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  char path[PATH_MAX];
  void* result = (void*)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
  int shares = (flags & MAP_TYPE) != MAP_PRIVATE && (protection & PROT_WRITE);
  if (fd >= 0 && shares && result != MAP_FAILED && begin(path_of(fd, path))) {
    record(MAPPED, inode_of(fd), 0, path, "", "", 0);
    end(1);
  }
  return result;
}
void* mmap64(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  return mmap(address, size, protection, flags, fd, offset);
}

// What there is no record for: it is done, and the log says that it cannot be believed.
static long refuse(int fd, long result, const char* name) {
  char path[PATH_MAX];
  if (result >= 0 && begin(path_of(fd, path))) {
    record(UNSUPPORTED, 0, 0, path, name, "", 0);
    end(1);
  }
  return result;
}
int sync_file_range(int fd, off_t offset, off_t size, unsigned flags) {
  return refuse(fd, syscall(SYS_sync_file_range, fd, offset, size, flags), "sync_file_range");
}
int syncfs(int fd) { return refuse(fd, syscall(SYS_syncfs, fd), "syncfs"); }

// A copy inside the kernel: not on this kernel, so that the caller reads and writes.
static long absent(int fd, long number, long a, long b, long c, long d, long e, long f) {
  char path[PATH_MAX];
  if (!path_of(fd, path)) return syscall(number, a, b, c, d, e, f);
  errno = ENOSYS;
  return -1;
}
ssize_t copy_file_range(int in, off_t* from, int out, off_t* to, size_t size, unsigned flags) {
  return absent(out, SYS_copy_file_range, in, (long)from, out, (long)to, size, flags);
}
ssize_t sendfile(int out, int in, off_t* offset, size_t size) {
  return absent(out, SYS_sendfile, out, in, (long)offset, size, 0, 0);
}
ssize_t sendfile64(int out, int in, off_t* offset, size_t size) {
  return sendfile(out, in, offset, size);
}
ssize_t splice(int in, off_t* from, int out, off_t* to, size_t size, unsigned flags) {
  return absent(out, SYS_splice, in, (long)from, out, (long)to, size, flags);
}

int symlinkat(const char* to, int folder, const char* name) {
  char path[PATH_MAX];
  int below = begin(path_at(folder, name, path));
  int result = syscall(SYS_symlinkat, to, folder, name);
  if (!result && below) record(UNSUPPORTED, 0, 0, path, "symlink", "", 0);
  end(below);
  return result;
}
int symlink(const char* to, const char* name) { return symlinkat(to, AT_FDCWD, name); }

// The process says what it has promised; called through ctypes.
void record_mark(const char* text) {
  begin(1);
  if (log_fd >= 0) record(MARK, 0, 0, "", "", text, strlen(text));
  end(1);
}
