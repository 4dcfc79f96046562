//! Who has used a block: requests of one session, or others too. A *user* is a session by a few bits
//! of its hash, or the requests without one; each sequence notes itself in the rows of its blocks
//! when it is closed, in pools with hints. Two sessions may have the same bits; the notes are racy.

use crate::ids::SessionId;

/// Users of a block so far, in [`BITS`](Self::BITS) bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Users(u16);

impl Users {
    pub(super) const BITS: u32 = 8;
    /// It was computed just now, or came from another pool.
    pub(super) const NONE: Self = Self(0);
    const SESSIONLESS: Self = Self(1);
    const SEVERAL: Self = Self((1 << Self::BITS) - 1);

    /// Returns the user that a request is.
    pub(crate) fn of(session: Option<SessionId>) -> Self {
        let sessions = u64::from(Self::SEVERAL.0) - 2;
        let of = |session: SessionId| (session.0 ^ session.0 >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        session.map_or(Self::SESSIONLESS, |session| Self(2 + (of(session) % sessions) as u16))
    }

    pub(super) fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    pub(super) fn bits(self) -> u16 {
        self.0
    }

    /// Adds a user. Requests without a session may be of different ones.
    pub(super) fn and(self, user: Self) -> Self {
        match self {
            Self::NONE => user,
            _ if self == user && user != Self::SESSIONLESS => self,
            _ => Self::SEVERAL,
        }
    }

    /// Returns whether there were others than `user`, or than one if that is not known.
    pub(crate) fn has_others(self, user: Option<Self>) -> bool {
        self != Self::NONE && self != user.unwrap_or(self) || self == Self::SEVERAL
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn users_add_up() {
        let [one, other] = [3, 4].map(|id| Users::of(Some(SessionId(id))));
        let sessionless = Users::of(None);
        assert!(one != other && ![one, other].contains(&sessionless));
        let of = |users: &[Users]| users.iter().fold(Users::NONE, |all, &user| all.and(user));
        for (users, others_than_one, are_several) in [
            (&[][..], false, false),
            (&[one], false, false),
            (&[one, one], false, false),
            (&[other], true, false),
            (&[sessionless], true, false),
            (&[sessionless, sessionless], true, true),
            (&[one, sessionless], true, true),
            (&[one, other], true, true),
            (&[one, other, one], true, true),
        ] {
            let found = [Some(one), None].map(|user| of(users).has_others(user));
            assert_eq!(found, [others_than_one, are_several], "{users:?}");
        }
        let all = (0..100_000).map(|id| Users::of(Some(SessionId(id))));
        assert!(all.clone().all(|user| ![Users::NONE, Users::SEVERAL, sessionless].contains(&user)));
        assert!(all.clone().any(|user| user.bits() == 2) && all.clone().any(|user| user.bits() == 254));
    }
}
