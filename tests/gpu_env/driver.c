// A CUDA driver that has no GPU: libraries that are linked to libcuda.so.1 load with it.
#define _GNU_SOURCE
#include <dlfcn.h>

enum { NO_DEVICE = 100, NOT_FOUND = 500 };
#define NONE(name) int name(void) { return NO_DEVICE; }

NONE(cuInit)
NONE(cuCtxFromGreenCtx)
NONE(cuCtxPopCurrent_v2)
NONE(cuCtxPushCurrent_v2)
NONE(cuDevResourceGenerateDesc)
NONE(cuDevSmResourceSplitByCount)
NONE(cuDeviceGetDevResource)
NONE(cuGreenCtxCreate)
NONE(cuGreenCtxDestroy)
NONE(cuGreenCtxGetDevResource)
NONE(cuPointerGetAttribute)
NONE(cuStreamCreate)

int cuDeviceGetCount(int *count) { *count = 0; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int error, const char **name) { *name = "NO_DEVICE"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "there is no GPU"; return 0; }

int cuGetProcAddress_v2(const char *name, void **address, int version, unsigned long long flags, int *status) {
    *address = dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), name);
    if (status) *status = !*address;
    return *address ? 0 : NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **address, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, address, version, flags, 0);
}
