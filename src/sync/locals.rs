//! Thread-locals and epoch guards under loom: one loom thread-local for both.
//!
//! loom drops a thread's locals in random order. Two of ours perform atomic operations in their
//! destructors (thread caches and the epoch collector's entry), so that each run would explore
//! another model. Here they are fields of one local, dropped in order of creation, the collector
//! last. When an execution fails, loom drops its remains outside of the execution, where an atomic
//! operation panics, and a panic in a destructor aborts: both are leaked in that case.

use std::any::Any;
use std::cell::RefCell;
use std::mem::{ManuallyDrop, take};
use std::rc::Rc;

use crossbeam_epoch::{Collector, Guard, LocalHandle};

struct Thread {
    locals: RefCell<Vec<(usize, Rc<dyn Any>)>>,
    epoch: Leaked<LocalHandle>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        // In order; `epoch` follows.
        take(self.locals.get_mut()).into_iter().map(|(_, local)| Leaked::new(local)).for_each(drop);
    }
}

struct Leaked<T>(ManuallyDrop<T>);

impl<T> Leaked<T> {
    fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T> Drop for Leaked<T> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

loom::lazy_static! {
    static ref COLLECTOR: Leaked<Collector> = Leaked::new(Collector::new());
}

loom::thread_local! {
    static THREAD: Thread = Thread { locals: RefCell::default(), epoch: Leaked::new(COLLECTOR.0.register()) };
}

pub(crate) fn pin() -> Guard {
    THREAD.try_with(|thread| thread.epoch.0.pin()).unwrap_or_else(|_| COLLECTOR.0.register().pin())
}

#[derive(Debug)]
pub(crate) struct Gone;

pub(crate) struct LocalKey<T: 'static> {
    init: fn() -> T,
}

impl<T: 'static> LocalKey<T> {
    pub(crate) const fn new(init: fn() -> T) -> Self {
        Self { init }
    }

    pub(crate) fn try_with<R>(&'static self, f: impl FnOnce(&T) -> R) -> Result<R, Gone> {
        let key = &raw const *self as usize;
        let value = THREAD.try_with(|thread| {
            let known =
                thread.locals.borrow().iter().find(|(of, _)| *of == key).map(|(_, value)| Rc::clone(value));
            known.unwrap_or_else(|| {
                let value: Rc<dyn Any> = Rc::new((self.init)());
                thread.locals.borrow_mut().push((key, Rc::clone(&value)));
                value
            })
        });
        let value = value.map_err(|_| Gone)?;
        Ok(f(value.downcast_ref().expect("a key's value has the key's type")))
    }

    pub(crate) fn with<R>(&'static self, f: impl FnOnce(&T) -> R) -> R {
        self.try_with(f).expect("the thread's locals are not destroyed yet")
    }
}

macro_rules! local {
    ($(#[$attribute:meta])* static $name:ident: $type:ty = $value:expr;) => {
        $(#[$attribute])* static $name: $crate::sync::locals::LocalKey<$type> = $crate::sync::locals::LocalKey::new(|| $value);
    };
}
pub(crate) use local;
