/* The calls of CUDA's driver that asyncrl/weights/ipc.py makes, with the signatures of cuda.h, over POSIX shared memory: for tests of how they
   are called (arguments, a struct by value, the current context), where there is no device. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext;
typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { char bytes[16]; } CUuuid;

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { MOST = 16 };

static int is_initialized, num_made;
static __thread int depth;
static struct { CUdeviceptr pointer; size_t size; char name[48]; int is_own; } held[MOST];

static int find(CUdeviceptr pointer, int is_own) {
    for (int i = 0; i < MOST; i++)
        if (held[i].pointer == pointer && pointer && held[i].is_own == is_own) return i;
    return -1;
}

static CUresult map(CUdeviceptr *pointer, const char *name, size_t size, int is_own) {
    int file = shm_open(name, O_RDWR | (is_own ? O_CREAT | O_EXCL : 0), 0600), i = 0;
    if (file < 0) return INVALID_HANDLE;
    if (is_own && ftruncate(file, size)) return OUT_OF_MEMORY;
    void *memory = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    while (i < MOST && held[i].pointer) i++;
    if (memory == MAP_FAILED || i == MOST) return OUT_OF_MEMORY;
    held[i].pointer = *pointer = (CUdeviceptr)(uintptr_t)memory;
    held[i].size = size;
    held[i].is_own = is_own;
    strncpy(held[i].name, name, sizeof held[i].name - 1);
    return 0;
}

static CUresult unmap(CUdeviceptr pointer, int is_own) {
    int i = find(pointer, is_own);
    if (!depth) return INVALID_CONTEXT;
    if (i < 0) return INVALID_VALUE;
    munmap((void *)(uintptr_t)pointer, held[i].size);
    if (is_own) shm_unlink(held[i].name);
    held[i].pointer = 0;
    return 0;
}

int num_held(void) {
    int count = 0;
    for (int i = 0; i < MOST; i++) count += held[i].pointer != 0;
    return count;
}

CUresult cuInit(unsigned int flags) { return is_initialized = flags == 0, flags ? INVALID_VALUE : 0; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (!is_initialized) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal > 1) return INVALID_DEVICE;
    *device = 70 + ordinal; /* a device is not its ordinal */
    return 0;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    if (device != 70 && device != 71) return INVALID_DEVICE;
    memset(uuid, device, sizeof *uuid);
    return 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (device != 70 && device != 71) return INVALID_DEVICE;
    *context = (void *)(UINT64_C(0x7000000000) + device); /* wider than an int */
    return 0;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if ((uintptr_t)context >> 32 != 0x70) return INVALID_CONTEXT;
    depth++;
    return 0;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!depth || !context) return INVALID_CONTEXT;
    depth--;
    return 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size) {
    char name[48];
    if (!depth) return INVALID_CONTEXT;
    if (!size || size > (size_t)1 << 40) return size ? OUT_OF_MEMORY : INVALID_VALUE;
    snprintf(name, sizeof name, "/asyncrl-stub-%d-%d", getpid(), num_made++);
    return map(pointer, name, size, 1);
}

CUresult cuMemFree_v2(CUdeviceptr pointer) { return unmap(pointer, 1); }

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    int i = find(pointer, 1);
    if (!depth || i < 0) return depth ? INVALID_VALUE : INVALID_CONTEXT;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved + 1, &held[i].size, 8); /* bytes of zero in front and between, as real ones have */
    strcpy(handle->reserved + 16, held[i].name);
    return 0;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    size_t size;
    if (!depth || flags != 1) return depth ? INVALID_VALUE : INVALID_CONTEXT;
    memcpy(&size, handle.reserved + 1, 8);
    return map(pointer, handle.reserved + 16, size, 0);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) { return unmap(pointer, 0); }

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == INVALID_HANDLE ? "invalid resource handle" : "some error";
    return 0;
}
