/* The 19 functions of Mooncake's store_c.h over a table in memory, with faults, for tests.
 *
 * Written from the documented behaviour; it shares no code with Mooncake. Two more functions control it:
 * fake_set_fault, and fake_count for the number of values. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum fault {
    NONE,
    STORES_NOTHING, /* puts are confirmed, and nothing is stored */
    TRANSFER,       /* gets and puts answer -800 */
    RPC,            /* everything answers -900 */
    FOREIGN,        /* gets bring another value */
    HANG,           /* calls wait until the fault ends */
    PUTS_RPC,       /* puts answer -900, and reads go on: a master of another version */
    SHORT,          /* gets bring a byte less */
    LATE_WRITE,     /* gets answer -800, and write their buffer later */
    SETUP,          /* the setup fails */
    CORRUPT,        /* gets bring a wrong byte */
    TOO_LONG,       /* gets claim more bytes than their buffer has */
};

struct config {
    size_t replica_num;
    int with_soft_pin;
    int with_hard_pin;
    const char **preferred_segments;
    size_t preferred_segments_count;
};

struct entry {
    char *key;
    char *bytes;
    size_t size;
};

struct range {
    char *start;
    size_t size;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct entry *entries;
static size_t count, room;
static struct range ranges[1024];
static size_t range_count;
static enum fault fault;

void fake_set_fault(int now) {
    pthread_mutex_lock(&lock);
    fault = now;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

size_t fake_count(void) {
    pthread_mutex_lock(&lock);
    size_t now = count;
    pthread_mutex_unlock(&lock);
    return now;
}

static enum fault enter(void) {
    pthread_mutex_lock(&lock);
    while (fault == HANG)
        pthread_cond_wait(&changed, &lock);
    return fault;
}

static void leave(void) { pthread_mutex_unlock(&lock); }

static struct entry *find(const char *key) {
    for (size_t i = 0; i < count; i++)
        if (!strcmp(entries[i].key, key))
            return &entries[i];
    return NULL;
}

static int is_registered(const char *start, size_t size) {
    for (size_t i = 0; i < range_count; i++)
        if (ranges[i].start <= start && start + size <= ranges[i].start + ranges[i].size)
            return 1;
    return 0;
}

static void insert(const char *key, const void *value, size_t size) {
    if (count == room) {
        room = room ? 2 * room : 64;
        entries = realloc(entries, room * sizeof *entries);
    }
    struct entry *entry = &entries[count++];
    entry->key = strdup(key);
    entry->bytes = malloc(size ? size : 1);
    memcpy(entry->bytes, value, size);
    entry->size = size;
}

static int put_one(enum fault now, const char *key, const void *value, size_t size, const struct config *config) {
    if (now == RPC || now == PUTS_RPC)
        return -900;
    if (now == TRANSFER)
        return -800;
    if (config && (config->replica_num != 1 || config->with_soft_pin || config->with_hard_pin ||
                   config->preferred_segments || config->preferred_segments_count))
        return -600;
    if (now != STORES_NOTHING && !find(key))
        insert(key, value, size);
    return 0; /* also if it exists: objects are immutable */
}

struct late {
    char *buffer;
    size_t size;
};

static void *write_late(void *argument) {
    struct late *late = argument;
    usleep(30000);
    memset(late->buffer, 0xEE, late->size);
    free(late);
    return NULL;
}

static int64_t get_one(enum fault now, const char *key, char *buffer, size_t size) {
    if (now == RPC)
        return -900;
    if (now == TRANSFER || !is_registered(buffer, size))
        return -800;
    struct entry *entry = find(key);
    if (!entry)
        return -704;
    if (now == LATE_WRITE) {
        struct late *late = malloc(sizeof *late);
        *late = (struct late){buffer, size};
        pthread_t thread;
        pthread_create(&thread, NULL, write_late, late);
        pthread_detach(thread);
        return -800;
    }
    if (now == FOREIGN && count > 1)
        entry = entry == entries ? entries + 1 : entries;
    if (entry->size > size)
        return -600;
    if (now == TOO_LONG)
        return (int64_t)size + 1;
    memcpy(buffer, entry->bytes, entry->size);
    if (now == CORRUPT)
        buffer[entry->size / 2] ^= 1;
    return (int64_t)(now == SHORT ? entry->size - 1 : entry->size);
}

void *mooncake_store_create(void) { return malloc(1); }

void mooncake_store_destroy(void *store) { free(store); }

int mooncake_store_setup(void *store, const char *host, const char *metadata, uint64_t segment, uint64_t buffer,
                         const char *protocol, const char *device, const char *master) {
    (void)store, (void)segment, (void)buffer, (void)device;
    enum fault now = enter();
    leave();
    return now == SETUP || !*host || !*metadata || !*protocol || !*master ? -1 : 0;
}

int mooncake_store_init_all(void *store, const char *protocol, const char *device, uint64_t segment) {
    (void)store, (void)protocol, (void)device, (void)segment;
    return 0;
}

int mooncake_store_health_check(void *store) { return store ? 0 : -1; }

int mooncake_store_put(void *store, const char *key, const void *value, size_t size, const struct config *config) {
    (void)store;
    int code = put_one(enter(), key, value, size, config);
    leave();
    return code;
}

int mooncake_store_put_from(void *store, const char *key, void *buffer, size_t size, const struct config *config) {
    (void)store;
    enum fault now = enter();
    int code = is_registered(buffer, size) ? put_one(now, key, buffer, size, config) : -800;
    leave();
    return code;
}

int mooncake_store_batch_put_from(void *store, const char **keys, void **buffers, const size_t *sizes, size_t n,
                                  const struct config *config, int *results) {
    for (size_t i = 0; i < n; i++)
        results[i] = mooncake_store_put_from(store, keys[i], buffers[i], sizes[i], config);
    return 0;
}

int64_t mooncake_store_get_into(void *store, const char *key, void *buffer, size_t size) {
    (void)store;
    int64_t code = get_one(enter(), key, buffer, size);
    leave();
    return code;
}

int mooncake_store_batch_get_into(void *store, const char **keys, void **buffers, const size_t *sizes, size_t n,
                                  int64_t *results) {
    for (size_t i = 0; i < n; i++)
        results[i] = mooncake_store_get_into(store, keys[i], buffers[i], sizes[i]);
    return 0;
}

int mooncake_store_is_exist(void *store, const char *key) {
    (void)store;
    enum fault now = enter();
    int code = now == RPC ? -900 : find(key) != NULL;
    leave();
    return code;
}

int mooncake_store_batch_is_exist(void *store, const char **keys, size_t n, int *results) {
    for (size_t i = 0; i < n; i++)
        results[i] = mooncake_store_is_exist(store, keys[i]);
    return 0;
}

int64_t mooncake_store_get_size(void *store, const char *key) {
    (void)store;
    enter();
    struct entry *entry = find(key);
    int64_t size = entry ? (int64_t)entry->size : -704;
    leave();
    return size;
}

int mooncake_store_get_hostname(void *store, char *out, size_t size) {
    (void)store;
    strncpy(out, "fake", size);
    return 0;
}

int mooncake_store_remove(void *store, const char *key, int force) {
    (void)store, (void)force;
    enter();
    struct entry *entry = find(key);
    if (entry) {
        free(entry->key);
        free(entry->bytes);
        *entry = entries[--count];
    }
    leave();
    return entry ? 0 : -704;
}

int64_t mooncake_store_remove_by_regex(void *store, const char *pattern, int force) {
    (void)store, (void)pattern, (void)force;
    return 0;
}

int64_t mooncake_store_remove_all(void *store, int force) {
    (void)store, (void)force;
    return 0;
}

int mooncake_store_register_buffer(void *store, void *buffer, size_t size) {
    (void)store;
    pthread_mutex_lock(&lock);
    int code = range_count < 1024 ? 0 : -1;
    if (!code)
        ranges[range_count++] = (struct range){buffer, size};
    leave();
    return code;
}

int mooncake_store_unregister_buffer(void *store, void *buffer) {
    (void)store;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < range_count; i++)
        if (ranges[i].start == (char *)buffer) {
            ranges[i] = ranges[--range_count];
            break;
        }
    leave();
    return 0;
}
