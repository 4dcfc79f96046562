use std::convert::Infallible;
use std::sync::Arc;

use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::{iter, unfold};

use super::super::connections::ConnectionPermit;
use super::super::problem::AdminError;
use super::hub::{Entry, Hub, Next, Place};

impl Hub {
    /// Returns an endless answer that starts after the event of this id, if it is known.
    pub(in super::super) fn follow(
        self: &Arc<Self>,
        last: Option<&str>,
        permit: Option<Arc<ConnectionPermit>>,
    ) -> Result<impl IntoResponse + use<>, AdminError> {
        let place = self.place(last, permit.clone())?;
        if let Some(permit) = permit {
            permit.following();
        }
        let events = unfold(place, async |mut place| Some((iter(events(&mut place).await?), place)));
        Ok(Sse::new(events.flatten()).into_response() as Response)
    }
}

async fn events(place: &mut Place) -> Option<Vec<Result<Event, Infallible>>> {
    loop {
        match place.take() {
            Next::Events(entries) => {
                let last = entries.len() - 1;
                let event = |(at, entry): (usize, Entry)| {
                    let event = Event::default().event(entry.name).data(&*entry.data);
                    let id = format!("{}-{}", place.epoch(), entry.number);
                    // Events of one number are delivered together or not at all.
                    Ok(if at == last { event.id(id) } else { event })
                };
                return Some(entries.into_iter().enumerate().map(event).collect());
            }
            Next::Nothing => place.news.changed().await.ok()?,
            Next::Lost => return None,
        }
    }
}
